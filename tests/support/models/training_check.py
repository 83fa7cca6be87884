"""Check that a model with FP32 inputs predicts and trains as in FP32, but for rounding."""

import torch
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.models.inspection import BF16
from tests.support.models.vision_and_speech_models import UNIT


def check_training(model: nn.Module, batch: dict[str, torch.Tensor], keep_fp32: tuple[str, ...]) -> None:
    """Assert that FP32 inputs are rounded, and that predictions are those of FP32 but for rounding.

    Args:
        keep_fp32: names of layers that stay in FP32.
    """
    model.eval()  # batch norm divides by a constant, dropout and drop path are off
    calls = [0]
    handles = [
        module.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        for module in model.modules()
        if not module._modules
    ]
    exact = model(**batch)
    for handle in handles:
        handle.remove()
    report = cast_model(model, keep_fp32=keep_fp32)
    assert "" in report.inputs
    before = {key: value.clone() for key, value in batch.items()}
    outputs = model(**batch)
    rounded = {key: value.to(BF16) if value.is_floating_point() else value for key, value in batch.items()}
    assert torch.equal(outputs.logits, model(**rounded).logits)
    assert all(torch.equal(batch[key], before[key]) and batch[key].dtype == before[key].dtype for key in batch)
    # A leaf rounds its weight and its output once, and what stands between leaves (a residual sum, the
    # attention) once more: 3 roundings for each call of a leaf, whose independent errors add up like a
    # root, to sqrt(3 calls) u of the largest logit.
    tolerance = (3 * calls[0]) ** 0.5 * UNIT * exact.logits.abs().max()
    assert outputs.logits.dtype == BF16
    assert (outputs.logits - exact.logits).abs().max() <= tolerance

    model.train()
    model(**batch).loss.backward()
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all(), path
    assert sum(p.grad is not None for p in model.parameters()) > 5
