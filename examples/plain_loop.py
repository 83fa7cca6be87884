"""Train in pure BF16 without Trainer: cast the model, use the optimizer, save the FP32 weights.

    python examples/plain_loop.py --steps 200 --rounding kahan --output out

It trains a small byte-level Llama on the source of Python's standard library; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowprec


def batches(tokens: torch.Tensor, size: int, length: int, seed: int):
    """Random windows of the text, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(tokens) - length, (size, 1), generator=generator)
        yield tokens[starts + torch.arange(length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounding", choices=["kahan", "stochastic", "nearest"], default="kahan")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("out"))
    options = parser.parse_args()

    torch.manual_seed(0)
    tokens = torch.tensor(list((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()))
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    print(hf_lowprec.cast_model(model))
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01, rounding=options.rounding)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    for step, batch in zip(range(1, options.steps + 1), batches(tokens, 8, 128, seed=0), strict=False):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps:
            print(f"step {step:>5}  loss {loss.item():.4f}")

    # Weight plus compensation: what to keep for merging, averaging or further FP32 training.
    options.output.mkdir(parents=True, exist_ok=True)
    weights = hf_lowprec.fp32_state_dict(model, optimizer)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, options.output / "fp32.safetensors")
    model.save_pretrained(options.output)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
