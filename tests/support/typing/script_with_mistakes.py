"""A user's program with mistakes: mypy must report each line that has a comment `# error: CODE`, and no other."""

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn

import hf_lowprec
from hf_lowprec import AdmW  # error: attr-defined


def mistakes(model: nn.Module) -> None:
    params = list(model.parameters())
    hf_lowprec.AdamW(params, rounding="khan")  # error: arg-type
    hf_lowprec.AdamW(params, state_rounding="up")  # error: arg-type
    hf_lowprec.Lion(params, backend="cuda")  # error: arg-type
    hf_lowprec.Adam(params, lr="1e-3")  # error: arg-type
    hf_lowprec.Adan(params, betas=(0.9, 0.99))  # error: arg-type
    hf_lowprec.RAdam(params, fused=True)  # error: call-arg
    hf_lowprec.StableAdamW(params, state_dtype="float32")  # error: arg-type
    hf_lowprec.Muon(params, adjust_lr_fn="moonlight")  # error: arg-type
    hf_lowprec.LowPrecisionCallback(grad_accumulation="bf16")  # error: arg-type
    hf_lowprec.prepare_accelerator(Accelerator(), grad_accumulation="bf16")  # error: arg-type
    hf_lowprec.cast_model(model, 16)  # error: arg-type
    optimizer = hf_lowprec.AdamW(params)
    hf_lowprec.save_pretrained(model, optimizer, "out", dtype="float16")  # error: arg-type
    optimizer.clip_grad_norm(1.0)  # error: attr-defined
    loss: torch.Tensor = hf_lowprec.fp32_state_dict(model, optimizer)  # error: assignment
    hf_lowprec.cast(model, loss, AdmW)  # error: attr-defined
