"""A user's program, as it may be written. `tests/test_typing.py` lets mypy read it; nobody runs it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import Trainer, TrainingArguments

import hf_lowprec
from hf_lowprec import AdamW, LowPrecisionCallback, cast_model
from hf_lowprec.reduction import reduce_in_fp32


def train_with_trainer(model: nn.Module, folder: Path) -> None:
    args = TrainingArguments(output_dir=str(folder), optim="adamw_bf16_kahan")
    callback = LowPrecisionCallback(keep_fp32=["lm_head"], grad_accumulation="fp32")
    trainer = Trainer(model=model, args=args, callbacks=[callback])
    trainer.train()
    cls, kwargs = hf_lowprec.optimizer_factory("lion_bf16_sr", lr=1e-4, rounding="sr")
    Trainer(model=model, args=args, optimizer_cls_and_kwargs=(cls, kwargs))


def train_in_own_loop(model: nn.Module, batches: list[Tensor], folder: Path) -> float:
    report: hf_lowprec.CastReport = cast_model(model, torch.bfloat16, keep_fp32="lm_head", keep_low_bits=False)
    print(report)
    decay = [param for param in model.parameters() if param.ndim > 1]
    rest = [param for param in model.parameters() if param.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "rounding": "kahan"}]
    optimizer = hf_lowprec.AdamW(
        groups,
        lr=1e-4,
        betas=(0.9, 0.95),
        rounding="kahan",
        state_dtype={"exp_avg_sq": torch.float32},
        state_rounding="stochastic",
        backend="auto",
        max_grad_norm=1.0,
    )
    schedule = CosineAnnealingLR(optimizer, T_max=len(batches))
    average = hf_lowprec.AveragedModel(model)
    hf_lowprec.return_float32(model)
    loss = torch.zeros(())
    for batch in batches:
        loss = model(batch).mean()
        loss.backward()
        norm: Tensor = optimizer.clip_grad_norm_(1.0)
        print(norm, optimizer.skipped_steps, optimizer.grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.update_parameters(model, optimizer)
    monitor = hf_lowprec.PrecisionMonitor(optimizer, model, every=100)
    print(monitor.last, [finding.message for finding in monitor.findings()])
    weights: dict[str, Tensor] = hf_lowprec.fp32_state_dict(model, optimizer)
    hf_lowprec.keep_low_bits(optimizer)
    hf_lowprec.drop_low_bits(model)
    torch.save([weights, optimizer.state_dict()], folder / "weights.pt")
    hf_lowprec.save_pretrained(model, optimizer, folder, dtype="bfloat16")
    engine, *_ = hf_lowprec.initialize_deepspeed(model, AdamW(model.parameters()), folder / "zero2.json")
    print(engine.global_steps)
    print(hf_lowprec.export_checkpoint(folder, folder / "out", dtype=torch.float32), reduce_in_fp32)
    return float(loss)


def every_optimizer(model: nn.Module) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    return [
        AdamW(params, amsgrad=True),
        hf_lowprec.Adafactor(params, beta1=0.9, eps=(1e-30, 1e-3), relative_step=False),
        hf_lowprec.Adam(model.parameters(), decoupled_weight_decay=True, rounding="stochastic"),
        hf_lowprec.RAdam(model.named_parameters(), lr=torch.tensor(1e-3)),
        hf_lowprec.Prodigy(params, lr=1.0, betas=(0.9, 0.99), safeguard_warmup=True),
        hf_lowprec.ScheduleFreeAdamW(params, betas=(0.9, 0.99), warmup_steps=10),
        hf_lowprec.StableAdamW(params, state_dtype=torch.float32),
        hf_lowprec.Lion(params, betas=(0.9, 0.99), rounding="nearest"),
        hf_lowprec.SGD(params, momentum=0.9, nesterov=True, seed=1),
        hf_lowprec.Adan(params, betas=(0.98, 0.92, 0.99), skip_nonfinite=True),
        hf_lowprec.Muon(params, matrices=hf_lowprec.hidden_matrices(model), adjust_lr_fn="original"),
    ]


hf_lowprec.register()
names: tuple[str, ...] = hf_lowprec.OPTIMIZER_NAMES
print(hf_lowprec.__version__.split("."), names)
