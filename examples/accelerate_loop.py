"""Train in pure BF16 with Accelerate and without Trainer: cast the model, use the optimizer, save the FP32 weights.

python examples/accelerate_loop.py --model HuggingFaceTB/SmolLM2-135M --text my.txt --output out
python examples/accelerate_loop.py --smoke
accelerate launch --config_file examples/configs/ddp.yaml examples/accelerate_loop.py ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

import smoke
import torch
from accelerate import Accelerator
from continued_pretraining import blocks
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowprec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M", help="hub name or folder")
    parser.add_argument("--text", default="my.txt", help="a text file")
    parser.add_argument("--block", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounding", choices=["split", "kahan", "stochastic", "nearest"], default="split")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--smoke", action="store_true", help="train a tiny model, within a minute")
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.smoke:
        options.model, options.text = smoke.causal_lm(options.output), smoke.text()
        options.block, options.lr, options.epochs = 128, 3e-3, 2

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    data = blocks(tokenizer(Path(options.text).read_text())["input_ids"], options.block)

    accelerator = Accelerator()
    accelerator.print(hf_lowprec.cast_model(model))
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01, rounding=options.rounding)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader) * options.epochs)
    hf_lowprec.prepare_accelerator(accelerator)  # FP32 sums over ranks, FP32 losses and outputs
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    for epoch in range(options.epochs):
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 20 == 0 or step == len(loader) - 1:
                accelerator.print(f"epoch {epoch} step {step:>4}  loss {loss.item():.4f}")

    # On every rank; rank 0 writes. The FP32 weights, remainders included, and the same rounded to BF16 for serving.
    fp32, bf16 = options.output / "fp32", options.output / "bf16"
    hf_lowprec.save_pretrained(model, optimizer, fp32, processing_class=tokenizer)
    hf_lowprec.save_pretrained(model, optimizer, bf16, processing_class=tokenizer, dtype="bfloat16")
    accelerator.print(f"written to {fp32} and {bf16}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
