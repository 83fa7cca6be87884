"""Fine-tune an encoder to classify sentences, as GLUE has it, in pure BF16.

    python examples/classification.py --model answerdotai/ModernBERT-base --dataset stanfordnlp/sst2 --output_dir out
    python examples/classification.py --smoke

The dataset has the columns `sentence` and `label`. Every field of `TrainingArguments` is an option.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
import smoke
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

import hf_lowprec  # noqa: F401  (registers the optimizer names)


@dataclass
class Options:
    model: str = field(default="answerdotai/ModernBERT-base", metadata={"help": "hub name or folder"})
    dataset: str = field(default="stanfordnlp/sst2", metadata={"help": "hub name or folder; columns sentence, label"})
    smoke: bool = field(default=False, metadata={"help": "train a tiny model on generated data, within a minute"})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Options))
    parser.set_defaults(
        eval_on_start=True, optim="adamw_bf16_split", learning_rate=2e-5, warmup_steps=10, logging_steps=10
    )
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke.ARGUMENTS)
    args, options = parser.parse_args_into_dataclasses()

    if options.smoke:
        options.model, options.dataset = smoke.encoder(args.output_dir), smoke.sentences(args.output_dir)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = load_dataset(options.dataset, split="train")
    labels = len(set(data["label"]))
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=labels)
    data = data.map(lambda rows: tokenizer(rows["sentence"], truncation=True), batched=True)
    data = data.select_columns(["input_ids", "attention_mask", "label"]).train_test_split(0.1, seed=args.seed)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    before, after = evaluations[0], evaluations[-1]
    trainer.accelerator.print(f"validation loss {before['eval_loss']:.4f} -> {after['eval_loss']:.4f}")
    trainer.accelerator.print(f"accuracy {before['eval_accuracy']:.1%} -> {after['eval_accuracy']:.1%}")
    trainer.save_model()


if __name__ == "__main__":
    main()
