"""`cast_model` on every architecture: what ends up in which dtype, and that training on it works."""

import copy

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.broken_layers import check_around_broken_layers
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP32, bits, norm_modules, output_dtypes
from tests.support.models.tiny_models import ARCHITECTURES, LAYERS

NORMS_PER_MODEL = {
    "llama": 5,
    "mistral": 5,
    "qwen2": 5,
    "qwen3": 9,
    "gemma2": 9,
    "gemma3": 13,
    "phi3": 5,
    "gpt2": 5,
    "gpt_neox": 5,
    "opt": 5,
    "bert": 5,
    "roberta": 5,
    "t5": 12,
    "vit": 5,
}
VARIANTS = [
    pytest.param(name, tied, attention, id=f"{name}-{'tied' if tied else 'untied'}-{attention}")
    for name, architecture in ARCHITECTURES.items()
    for tied, attention in architecture.variants()
]


def tie_pattern(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(groups.values())


def check_training(
    model: nn.Module, batch: tiny_models.Batch, keep_fp32: tuple[str, ...], name: str, tied: bool, attention: str
) -> None:
    """Check that a model is cast as it should be and trains as in FP32; the modules of `keep_fp32` stay in FP32."""
    assert model.config._attn_implementation == attention
    reference = copy.deepcopy(model)
    exact = reference(**batch)
    exact.loss.backward()
    identities = [id(parameter) for parameter in model.parameters()]
    ties = tie_pattern(model)
    # T5 shares its input embedding between encoder and decoder whether or not the head is tied to it.
    assert any(len(group) > 1 for group in ties) == (tied or name == "t5")

    report = cast_model(model, keep_fp32=keep_fp32)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert tie_pattern(model) == ties
    assert not report.warnings and report.changed and not report.already_cast

    norms = norm_modules(model)
    assert len(norms) == NORMS_PER_MODEL[name]
    held = {f"{path}.{leaf}" for path, module in norms.items() for leaf, _ in module.named_parameters()}
    held |= {path for path, _ in model.named_buffers() if "inv_freq" in path}
    held |= {path for path, _ in model.named_parameters() if name == "t5" and path.endswith(".wo.weight")}
    held |= {path for path, _ in model.named_parameters() if path.rpartition(".")[0] in keep_fp32}
    original, now = bits(reference), bits(model)
    for path, value in now.items():
        if not value.is_floating_point():
            assert torch.equal(value, original[path])
        elif path in held:
            assert value.dtype == FP32 and torch.equal(value, original[path]), path
        else:
            assert torch.equal(value, original[path].to(BF16)) and value.dtype == BF16, path

    seen = output_dtypes(model, batch)
    assert all(seen[path] == {BF16} for path in norms)
    leaking = {
        path: kinds
        for path, kinds in seen.items()
        if kinds - {BF16} and path and next(model.get_submodule(path).parameters(), None) is not None
    }
    assert not leaking

    outputs = model(**batch)
    assert outputs.logits.dtype == BF16
    # BF16 has 8 significant bits: a rounding to nearest errs by at most u = 2^-8 of the value. On its way
    # to a logit a value is rounded about ten times in each attention (norm, q, k, v, rotation, scores,
    # weights, context, projection, residual sum), five times in each feed-forward (norm, up, activation,
    # down, sum) and three times outside the layers (embedding, last norm, head). Independent errors add
    # up like a root, to sqrt(15 L + 3) u of the largest logit, and cross entropy moves by at most twice
    # the largest error of a logit. In T5 an encoder layer rounds 15 times and a decoder layer, with two
    # attentions, 25. A loss computed in BF16 rounds log-probability, mean and result once: 3 u more.
    unit = 2.0**-8
    roundings = (40 if name == "t5" else 15) * LAYERS + 3
    tolerance = 2 * roundings**0.5 * unit * exact.logits.detach().abs().max().item()
    tolerance += 3 * unit * exact.loss.item() if outputs.loss.dtype == BF16 else 0.0
    assert abs(outputs.loss.item() - exact.loss.item()) <= tolerance

    outputs.loss.backward()
    for (path, parameter), (_, twin) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (parameter.grad is None) == (twin.grad is None), path
        if parameter.grad is not None:
            assert parameter.grad.dtype == parameter.dtype, path
            assert parameter.grad.isfinite().all(), path
    # Both of torch's CPU paths, which differ in how they meet a mix of dtypes, without doubling the runs.
    torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=attention == "sdpa").step()
    assert model(**batch).loss.isfinite()


class TestArchitectures:
    @pytest.mark.combinations(1)
    @pytest.mark.parametrize(("name", "tied", "attention"), VARIANTS)
    def test_trains(self, name: str, tied: bool, attention: str) -> None:
        def build() -> tiny_models.Built:
            return ARCHITECTURES[name].build(seed=3, tied=tied, attention=attention)

        def check(model: nn.Module, batch: tiny_models.Batch, keep_fp32: tuple[str, ...]) -> None:
            check_training(model, batch, keep_fp32, name, tied, attention)

        check_around_broken_layers(f"{name}, {attention}", build, check)
