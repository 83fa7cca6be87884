"""Direct preference optimization with TRL in pure BF16, at learning rates at which plain BF16 does not train.

    python examples/dpo.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset my-data --output_dir out
    python examples/dpo.py --smoke

The dataset, a name on the hub or a folder, has the columns `prompt`, `chosen` and `rejected`. Every field of TRL's
`DPOConfig` is an option; its learning rate is 1e-6 by default, far below what a BF16 weight can store without its
remainder. Needs `pip install trl`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import smoke
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer

import hf_lowprec


@dataclass
class Options:
    model: str = field(default="HuggingFaceTB/SmolLM2-135M-Instruct", metadata={"help": "hub name or folder"})
    dataset: str = field(default="my-data", metadata={"help": "hub name or folder"})
    smoke: bool = field(default=False, metadata={"help": "train a tiny model on generated data, within a minute"})


def main() -> None:
    parser = HfArgumentParser((DPOConfig, Options))
    parser.set_defaults(eval_on_start=True, optim="adamw_bf16_split")
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke.ARGUMENTS)
    args, options = parser.parse_args_into_dataclasses()

    if options.smoke:
        options.model, options.dataset = smoke.causal_lm(args.output_dir), smoke.preferences(args.output_dir)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    data = load_dataset(options.dataset, split="train")

    data = data.train_test_split(0.1, seed=args.seed)
    trainer = DPOTrainer(
        model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    before, after = evaluations[0], evaluations[-1]
    trainer.accelerator.print(f"validation loss {before['eval_loss']:.4f} -> {after['eval_loss']:.4f}")
    trainer.accelerator.print(f"preferred answers chosen {after['eval_rewards/accuracies']:.0%}")
    # To BF16, once: `trainer.save_model()` would lose what moved a weight by less than half of BF16's spacing.
    hf_lowprec.save_pretrained(
        trainer.model, trainer.optimizer, args.output_dir, dtype="bfloat16", processing_class=tokenizer
    )


if __name__ == "__main__":
    main()
