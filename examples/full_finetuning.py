"""Fine-tune every weight of a causal language model on questions and answers, in pure BF16 with FP32's accuracy.

    python examples/full_finetuning.py --model HuggingFaceTB/SmolLM2-135M --dataset my-data --output_dir out
    python examples/full_finetuning.py --smoke

The dataset, a name on the hub or a folder, has the columns `prompt` and `completion`; the loss is that of the
completion. Every field of `TrainingArguments` is an option. An 8B model takes 80 GB, 10 bytes per parameter; with FP32
AdamW it takes 128 GB.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import smoke
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

import hf_lowprec


@dataclass
class Options:
    model: str = field(default="HuggingFaceTB/SmolLM2-135M", metadata={"help": "hub name or folder"})
    dataset: str = field(default="my-data", metadata={"help": "hub name or folder; columns prompt, completion"})
    length: int = field(default=2048, metadata={"help": "tokens that a row may have; the rest is cut off"})
    smoke: bool = field(default=False, metadata={"help": "train a tiny model on generated data, within a minute"})


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Options))
    parser.set_defaults(
        eval_on_start=True, optim="adamw_bf16_split", learning_rate=2e-5, warmup_steps=10, logging_steps=10
    )
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke.ARGUMENTS)
    args, options = parser.parse_args_into_dataclasses()

    if options.smoke:
        options.model, options.dataset = smoke.causal_lm(args.output_dir), smoke.questions(args.output_dir)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # many models have none
    model = AutoModelForCausalLM.from_pretrained(options.model)
    data = load_dataset(options.dataset, split="train")

    def encode(row: dict[str, str]) -> dict[str, Any]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        tokens, labels = prompt + answer, [-100] * len(prompt) + answer
        return {"input_ids": tokens[: options.length], "labels": labels[: options.length]}

    data = data.map(encode, remove_columns=data.column_names).train_test_split(0.1, seed=args.seed)
    trainer = Trainer(
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
    # To BF16, once: `trainer.save_model()` would lose what moved a weight by less than half of BF16's spacing.
    hf_lowprec.save_pretrained(
        trainer.model, trainer.optimizer, args.output_dir, dtype="bfloat16", processing_class=tokenizer
    )


if __name__ == "__main__":
    main()
