"""Parameters and modules with more than one name stay one, and in one dtype."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP32, fp32_names, hook_counts, output_dtypes


class TestTies:
    @pytest.mark.parametrize("keep", ["lm_head", "embed_tokens"])
    def test_every_owner_is_kept(self, keep: str) -> None:
        model, batch = tiny_models.llama(tied=True)
        report = cast_model(model, keep_fp32=keep)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.dtype == FP32
        assert {"lm_head", "model.embed_tokens"} <= report.kept.keys() & set(report.boundaries)
        seen = output_dtypes(model, batch)
        assert seen["lm_head"] == {FP32} and seen["model.embed_tokens"] == {BF16}
        model(**batch).loss.backward()
        assert model.lm_head.weight.grad.dtype == FP32

    def test_chain_against_the_order_of_modules(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        first, second, third, _ = model
        first.weight, second.bias = second.weight, third.bias
        report = cast_model(model, keep_fp32="2")
        assert fp32_names(model) == {f"{i}.{leaf}" for i in range(3) for leaf in ("weight", "bias")}
        assert set(report.boundaries) == {"0", "1", "2"}
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16

    def test_module_with_two_names(self) -> None:
        shared = nn.Linear(4, 4)
        model = nn.Sequential(OrderedDict(first=shared, middle=nn.Linear(4, 4), second=shared))
        cast_model(model, keep_fp32="second")
        assert shared.weight.dtype == FP32 and hook_counts(shared) == [(1, 1)]
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16
        assert not cast_model(model).changed and hook_counts(shared) == [(1, 1)]

    def test_shared_buffer(self) -> None:
        model = nn.ModuleList([nn.Module(), nn.Module()])
        table = torch.randn(3)
        for module in model:
            module.register_buffer("table", table)
        cast_model(model)
        assert model[0].table is model[1].table and model[0].table.dtype == BF16
