"""`cast_model` on a model that it has already cast, in whole or in part."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model, return_float32, uncast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP16, FP32, NORM_PATH, assert_same_bits, bits, fp32_names, hook_counts


class TestTwice:
    def test_changes_nothing(self) -> None:
        model, batch = tiny_models.llama()
        cast_model(model, keep_fp32="lm_head")
        state, hooks, loss = bits(model), hook_counts(model), model(**batch).loss
        for keep in ((), "lm_head", ["*.norm", "lm_head"]):
            report = cast_model(model, keep_fp32=keep)
            assert report.already_cast and not report.changed and not report.cast and not report.upcast
            assert report.before == report.after
            assert str(report).startswith("already cast to torch.bfloat16: nothing changed")
            assert_same_bits(bits(model), state)
            assert hook_counts(model) == hooks
        assert torch.equal(model(**batch).loss, loss)

    def test_other_dtype(self) -> None:
        model, _ = tiny_models.llama()
        cast_model(model.model)
        state = bits(model)
        with pytest.raises(ValueError, match=r"already cast to torch\.bfloat16"):
            cast_model(model, FP16)
        assert_same_bits(bits(model), state)

    def test_keeping_what_was_rounded(self) -> None:
        model, _ = tiny_models.llama()
        cast_model(model)
        with pytest.raises(ValueError, match=r"too late for lm_head\.weight"):
            cast_model(model, keep_fp32="lm_head")

    def test_grown_model(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        cast_model(model, keep_fp32="0")
        model.append(nn.Linear(4, 4)).append(nn.LayerNorm(4)).append(nn.Linear(4, 4))
        report = cast_model(model, keep_fp32="4")
        assert report.already_cast and report.changed
        assert set(report.cast) == {"2.weight", "2.bias"}
        assert {name.split(".")[0] for name in fp32_names(model)} == {"0", "1", "3", "4"}
        assert hook_counts(model)[1:] == [(1, 1), (1, 1), (1, 0), (1, 1), (1, 0)]
        assert model(torch.randn(2, 4)).dtype == FP32

    def test_after_a_stray_to(self) -> None:
        model, batch = tiny_models.llama()
        fresh = bits(model)
        cast_model(model)
        hooks = hook_counts(model)
        report = cast_model(model.to(BF16))
        assert set(report.upcast) == {n for n in fresh if NORM_PATH.search(n.rpartition(".")[0]) or "inv_freq" in n}
        assert report.already_cast and report.changed and hook_counts(model) == hooks
        assert torch.equal(model.model.rotary_emb.inv_freq, fresh["model.rotary_emb.inv_freq"])
        model(**batch).loss.backward()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class TestParts:
    def test_a_part_that_returned_float32_on_its_own(self) -> None:
        model, x = Whole(), torch.randn(3, 4)
        cast_model(model.encoder)
        return_float32(model.encoder)
        assert model.encoder(x).dtype == FP32
        cast_model(model)
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert model(x).dtype == model.encoder(x).dtype == BF16
        return_float32(model)
        assert model(x).dtype == FP32 and not cast_model(model).changed
        assert model(x).dtype == FP32, "the whole goes on returning FP32"

    def test_a_part_of_a_cast_model_returns_float32(self) -> None:
        model, x = Whole(), torch.randn(3, 4)
        cast_model(model)
        for part in (model.encoder.linear, copy.deepcopy(model.encoder), pickle.loads(pickle.dumps(model.encoder))):
            assert part(x.to(BF16)).dtype == BF16
            return_float32(part)
            assert part(x.to(BF16)).dtype == FP32
        uncast_model(model)
        with pytest.raises(ValueError, match="Encoder was not cast"):
            return_float32(model.encoder)

    def test_a_part_of_a_cast_model_is_cast_already(self) -> None:
        model = Whole()
        cast_model(model)
        report = cast_model(model.encoder)
        assert report.already_cast and not report.cast
        with pytest.raises(ValueError, match=r"too late for linear\."):
            cast_model(model.encoder, keep_fp32="linear")
