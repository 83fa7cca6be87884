"""Train a causal language model in pure BF16 with `transformers.Trainer`; the only change is the `optim` string.

    python examples/trainer.py --output_dir out --max_steps 200
    python examples/trainer.py --output_dir out --model HuggingFaceTB/SmolLM2-135M --text my.txt --learning_rate 2e-5

Without `--model` it trains a small byte-level Llama from random weights, and without `--text` on the source of Python's
standard library, so that nothing is downloaded. Every `TrainingArguments` field is an option.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import hf_lowprec  # noqa: F401  (registers the optimizer names)


@dataclass
class Options:
    model: str | None = field(default=None, metadata={"help": "hub name or folder; default: a small random Llama"})
    text: str | None = field(default=None, metadata={"help": "text file; default: the standard library's source"})
    block: int = field(default=128, metadata={"help": "tokens per sequence"})


def blocks(tokens: list[int], length: int) -> list[dict[str, torch.Tensor]]:
    """Cut a stream of tokens into sequences, each its own label."""
    rows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    defaults = {"optim": "adamw_bf16_kahan", "learning_rate": 1e-3, "logging_steps": 20, "report_to": "none"}
    parser = HfArgumentParser((TrainingArguments, Options))
    parser.set_defaults(**defaults)
    args, options = parser.parse_args_into_dataclasses(sys.argv[1:])

    source = Path(options.text or Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    torch.manual_seed(args.seed)
    if options.model:
        tokens = AutoTokenizer.from_pretrained(options.model)(source)["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        tokens = list(source.encode())
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
            )
        )
    data = blocks(tokens, options.block)
    held_out = max(1, len(data) // 10)
    trainer = Trainer(model=model, args=args, train_dataset=data[:-held_out], eval_dataset=data[-held_out:])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"validation loss {loss:.4f}, weights stored as {trainer.model.dtype}")


if __name__ == "__main__":
    main()
