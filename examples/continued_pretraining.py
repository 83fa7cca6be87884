"""Continue pre-training of a causal language model on your own text, with stochastic rounding: 8 bytes per parameter.

    python examples/continued_pretraining.py --model HuggingFaceTB/SmolLM2-135M --text my.txt --output_dir out
    python examples/continued_pretraining.py --smoke

Every field of `TrainingArguments` is an option. `examples/configs` has what `accelerate launch` needs for several GPUs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import smoke
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import hf_lowprec  # noqa: F401  (registers the optimizer names)


@dataclass
class Options:
    model: str = field(default="HuggingFaceTB/SmolLM2-135M", metadata={"help": "hub name or folder"})
    text: str = field(default="my.txt", metadata={"help": "a text file"})
    block: int = field(default=1024, metadata={"help": "tokens per sequence"})
    smoke: bool = field(default=False, metadata={"help": "train a tiny model, within a minute"})


def blocks(tokens: list[int], length: int) -> list[dict[str, torch.Tensor]]:
    """Cut a stream of tokens into sequences, each its own label."""
    rows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Options))
    parser.set_defaults(
        eval_on_start=True,
        optim="adamw_bf16_sr",
        learning_rate=1e-4,
        warmup_steps=10,
        weight_decay=0.1,
        logging_steps=10,
    )
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke.ARGUMENTS, block=128)
    args, options = parser.parse_args_into_dataclasses()

    if options.smoke:
        options.model, options.text = smoke.causal_lm(args.output_dir), smoke.text()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    data = blocks(tokenizer(Path(options.text).read_text())["input_ids"], options.block)
    held_out = max(1, len(data) // 10)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data[:-held_out],
        eval_dataset=data[-held_out:],
        data_collator=default_data_collator,  # all blocks have one length, so nothing is padded
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
