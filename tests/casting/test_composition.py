"""A cast model copied, pickled, checkpointed, compiled, on the meta device."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import (
    BF16,
    COPIES,
    FP16,
    FP32,
    assert_same_bits,
    bits,
    copy_of,
    dtypes,
    gradient_dtypes,
    hook_counts,
)
from tests.support.models.norm_layers import ScaleRMSNorm
from tests.support.models.tiny_models import ARCHITECTURES


class TestComposition:
    @pytest.mark.parametrize("through", COPIES)
    def test_copies(self, through: str) -> None:
        model, batch = tiny_models.llama(tied=True)
        cast_model(model, keep_fp32=nn.Embedding)
        twin = copy_of(model, through)
        assert_same_bits(bits(twin), bits(model))
        assert hook_counts(twin) == hook_counts(model)
        one, two = model(**batch).loss, twin(**batch).loss
        two.backward()
        assert torch.equal(one, two)
        report = cast_model(twin)
        assert report.already_cast and not report.changed

    def test_report_copies(self) -> None:
        report = cast_model(tiny_models.llama()[0])
        assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report
        with pytest.raises(AttributeError):
            report.dtype = FP16  # type: ignore[misc]

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("name", ["llama", "bert", "t5"])
    def test_gradient_checkpointing(self, name: str, reentrant: bool) -> None:
        model, batch = ARCHITECTURES[name].build()
        cast_model(model, keep_fp32="*.0.*.[ko]*")
        twin = copy.deepcopy(model)
        one = model(**batch).loss
        one.backward()
        twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
        two = twin(**batch).loss
        two.backward()
        assert torch.equal(one, two)
        for (path, left), (_, right) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert right.grad.dtype == right.dtype and right.grad.isfinite().all(), path
            # In T5 checkpointing changes the order in which the decoder layers' BF16 gradients are summed.
            assert name == "t5" or torch.equal(left.grad, right.grad), path

    def test_compile(self) -> None:
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), ScaleRMSNorm(4))
        cast_model(model, keep_fp32="2")
        x = torch.randn(3, 4, dtype=BF16)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))
        compiled(x).sum().backward()
        assert gradient_dtypes(model[1]) == {FP32}

    @pytest.mark.every_case
    def test_compile_language_model(self) -> None:
        torch.compiler.reset()
        model, batch = tiny_models.llama(num_hidden_layers=1)
        cast_model(model)
        compiled: Any = torch.compile(model, backend="aot_eager")
        loss = compiled(**batch).loss
        loss.backward()
        assert torch.equal(loss, model(**batch).loss)
        assert cast_model(compiled).already_cast

    def test_meta_device(self) -> None:
        with torch.device("meta"):
            model, _ = tiny_models.llama(tied=True)
        identities = [id(parameter) for parameter in model.parameters()]
        report = cast_model(model.to(BF16), keep_fp32="layers.0.mlp")
        assert [id(parameter) for parameter in model.parameters()] == identities
        assert all(parameter.is_meta for parameter in model.parameters())
        reference, _ = tiny_models.llama(tied=True)
        cast_model(reference, keep_fp32="layers.0.mlp")
        assert dtypes(model) == dtypes(reference)
        assert report.after == cast_model(reference).after and not report.warnings
        assert hook_counts(model) == hook_counts(reference)

    def test_fused_inference_path_of_torch(self) -> None:
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        exact = copy.deepcopy(model)
        cast_model(model)
        x = torch.randn(2, 3, 8)
        with torch.no_grad():
            out = model(x.to(BF16))
            # About 20 roundings of at most 2^-8 each, adding up like a root, of values that reach about 3.
            assert out.dtype == BF16 and (out - exact(x)).abs().max() < 20**0.5 * 2**-8 * 3

    def test_recurrent_layers(self) -> None:
        model = nn.LSTM(4, 4)
        cast_model(model)
        out, _ = model(torch.randn(3, 2, 4, dtype=BF16))
        out.sum().backward()
        assert out.dtype == BF16
