"""Fine-tune an encoder-decoder to answer prompts, in pure BF16.

    python examples/seq2seq.py --model google/flan-t5-small --dataset my-data --output_dir out
    python examples/seq2seq.py --smoke

The dataset, a name on the hub or a folder, has the columns `prompt` and `completion`. Every field of
`Seq2SeqTrainingArguments` is an option.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import smoke
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import hf_lowprec  # noqa: F401  (registers the optimizer names)


@dataclass
class Options:
    model: str = field(default="google/flan-t5-small", metadata={"help": "hub name or folder"})
    dataset: str = field(default="my-data", metadata={"help": "hub name or folder; columns prompt, completion"})
    smoke: bool = field(default=False, metadata={"help": "train a tiny model on generated data, within a minute"})


def main() -> None:
    parser = HfArgumentParser((Seq2SeqTrainingArguments, Options))
    parser.set_defaults(
        eval_on_start=True, optim="adamw_bf16_split", learning_rate=1e-4, warmup_steps=10, logging_steps=10
    )
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke.ARGUMENTS)
    args, options = parser.parse_args_into_dataclasses()

    if options.smoke:
        options.model, options.dataset = smoke.seq2seq(args.output_dir), smoke.questions(args.output_dir)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model)
    data = load_dataset(options.dataset, split="train")

    data = data.map(
        lambda rows: tokenizer(rows["prompt"], text_target=rows["completion"], truncation=True),
        batched=True,
        remove_columns=data.column_names,
    ).train_test_split(0.1, seed=args.seed)
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    before, after = evaluations[0], evaluations[-1]
    trainer.accelerator.print(f"validation loss {before['eval_loss']:.4f} -> {after['eval_loss']:.4f}")
    trainer.save_model()


if __name__ == "__main__":
    main()
