"""Pre-train with stochastic rounding, and switch to split weights while the learning rate decays.

    python examples/cooldown.py --model HuggingFaceTB/SmolLM2-135M --text my.txt --max_steps 10000 --output_dir out
    python examples/cooldown.py --smoke

A stochastically rounded weight scatters around its exact value by the spacing of BF16 numbers, which matters once steps
are small. So the last `--cooldown` share of the steps, in which a warmup-stable-decay schedule lowers the learning
rate, runs with FP32 weights, whose remainders take 2 more bytes per parameter. A run resumes on either side of the
switch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import smoke
from continued_pretraining import blocks
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
    cooldown: float = field(default=0.2, metadata={"help": "share of the steps, at the end"})
    smoke: bool = field(default=False, metadata={"help": "train a tiny model, within a minute"})


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Options))
    parser.set_defaults(
        eval_on_start=True,
        optim="adamw_bf16_sr",
        learning_rate=3e-4,
        warmup_steps=10,
        weight_decay=0.1,
        logging_steps=10,
    )
    parser.set_defaults(lr_scheduler_type="warmup_stable_decay", max_steps=1000)
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke.ARGUMENTS, block=128)
    args, options = parser.parse_args_into_dataclasses()
    args.lr_scheduler_kwargs = {"num_decay_steps": round(args.max_steps * options.cooldown)}
    args.optim_args = f"rounding=stochastic:{1 - options.cooldown}|split"

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
    modes = {group["rounding"] for group in trainer.optimizer.param_groups}
    trainer.accelerator.print(f"weights ended in the mode {', '.join(sorted(modes))}")
    trainer.save_model()


if __name__ == "__main__":
    main()
