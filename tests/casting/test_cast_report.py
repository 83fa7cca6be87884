"""The report that `cast_model` returns: its counts and its text."""

import re

import torch
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP32


class TestReport:
    def test_counts(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))
        model[2].register_buffer("scale", torch.ones(7))
        report = cast_model(model)
        # Linear 3*5 + 5, norm 5 + 5, linear 5*2; buffers: mean and variance 5 + 5, scale 7, a counter.
        assert report.before == {FP32: (40, 17, 4 * 57), torch.int64: (0, 1, 8)}
        assert report.after == {FP32: (10, 10, 4 * 20), BF16: (30, 7, 2 * 37), torch.int64: (0, 1, 8)}
        assert set(report.cast) == {"0.weight", "0.bias", "2.weight", "2.scale"}
        assert report.dtype == BF16 and report.kept == {"1": "norm (BatchNorm1d)"}

    def test_ties_count_once(self) -> None:
        model, _ = tiny_models.llama(tied=True)
        total = sum(parameter.numel() for parameter in model.parameters())
        report = cast_model(model)
        assert report.before[FP32].parameters == total
        assert sum(row.parameters for row in report.after.values()) == total

    def test_text(self) -> None:
        model, _ = tiny_models.llama()
        text = str(cast_model(model, keep_fp32="lm_head"))
        for line in (
            r"^cast to torch\.bfloat16: 15 tensors converted$",
            r"^  before torch\.float32 +[\d,]+ parameters, 8 buffer elements, [\d,]+ bytes$",
            r"^  after  torch\.bfloat16 ",
            r"^    model\.layers\.\*\.input_layernorm \(x2\): norm \(LlamaRMSNorm\)$",
            r"^    model\.norm: norm \(LlamaRMSNorm\)$",
            r"^    model\.rotary_emb: rotary \(LlamaRotaryEmbedding\)$",
            r"^    lm_head: keep_fp32 'lm_head'$",
        ):
            assert re.search(line, text, re.MULTILINE), (line, text)
        assert "upcast" not in text and "warning" not in text and "recomputed" not in text

    def test_text_of_a_model_loaded_in_bf16(self) -> None:
        model, _ = tiny_models.bert()
        text = str(cast_model(model.to(BF16)))
        assert re.search(r"LayerNorm\.weight: was torch\.bfloat16", text), text
        assert re.search(r"position_ids: Tensor of torch\.int64", text), text
