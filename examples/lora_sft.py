"""Supervised fine-tuning with LoRA by TRL and PEFT: a frozen BF16 model, BF16 adapters trained as split FP32 weights.

    python examples/lora_sft.py --model HuggingFaceTB/SmolLM2-135M --dataset my-data --output_dir out
    python examples/lora_sft.py --smoke

The dataset, a name on the hub or a folder, has the columns `prompt` and `completion`. Every field of TRL's
`SFTConfig` is an option. Needs `pip install trl peft`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import smoke
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

import hf_lowprec  # noqa: F401  (registers the optimizer names)


@dataclass
class Options:
    model: str = field(default="HuggingFaceTB/SmolLM2-135M", metadata={"help": "hub name or folder"})
    dataset: str = field(default="my-data", metadata={"help": "hub name or folder; columns prompt, completion"})
    rank: int = field(default=16, metadata={"help": "of the adapters"})
    smoke: bool = field(default=False, metadata={"help": "train a tiny model on generated data, within a minute"})


def main() -> None:
    parser = HfArgumentParser((SFTConfig, Options))
    parser.set_defaults(eval_on_start=True, optim="adamw_bf16_split", learning_rate=2e-4, warmup_steps=10)
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke.ARGUMENTS | {"learning_rate": 1e-2})
    args, options = parser.parse_args_into_dataclasses()

    if options.smoke:
        options.model, options.dataset = smoke.causal_lm(args.output_dir), smoke.questions(args.output_dir)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    data = load_dataset(options.dataset, split="train")

    data = data.train_test_split(0.1, seed=args.seed)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    before, after = evaluations[0], evaluations[-1]
    trainer.accelerator.print(f"validation loss {before['eval_loss']:.4f} -> {after['eval_loss']:.4f}")
    trainer.save_model()  # the adapter; trainer.model.merge_and_unload() gives the whole model


if __name__ == "__main__":
    main()
