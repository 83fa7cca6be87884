"""What stays in FP32 because the caller (`keep_fp32`) or the model's own class names it."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers.core_model_loading import build_glob_alternation

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import (
    BF16,
    FP32,
    assert_same_bits,
    bits,
    dtypes,
    fp32_names,
    hook_counts,
    output_dtypes,
)


class TestKeepPatterns:
    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            ("lm_head", r"lm_head\."),
            (["lm_head"], r"lm_head\."),
            (("lm_head", "embed_tokens"), r"lm_head\.|model\.embed_tokens\."),
            ("model.layers.0.self_attn.q_proj", r"model\.layers\.0\.self_attn\.q_proj\."),
            ("layers.0.*", r"model\.layers\.0\."),
            ("layers.0", r"model\.layers\.0\."),
            ("layers", r"model\.layers\."),
            ("*.mlp.down_proj", r".*\.mlp\.down_proj\."),
            ("mlp.down_proj", r".*\.mlp\.down_proj\."),
            ("[qk]_proj", r".*\.[qk]_proj\."),
            ("layers.1.mlp.up_proj.weight", r"model\.layers\.1\.mlp\.up_proj\."),
            ("model", r"model\."),
            (nn.Embedding, r"model\.embed_tokens\."),
            ([nn.Linear], r".*(_proj|lm_head)\."),
            ("*", r""),
        ],
        ids=str,
    )
    def test_keeps_exactly_these(self, keep: Any, expected: str) -> None:
        model, batch = tiny_models.llama()
        original = bits(model)
        names = {name for name in dtypes(model) if re.match(expected, name)}
        assert names
        cast_model(model)
        always = fp32_names(model)

        model, batch = tiny_models.llama()
        report = cast_model(model, keep_fp32=keep)
        assert fp32_names(model) == names | always
        assert all(torch.equal(bits(model)[name], original[name]) for name in names)
        outputs = model(**batch)
        assert outputs.logits.dtype == (FP32 if "lm_head.weight" in names else BF16)
        outputs.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert "keep_fp32" in str(report)

    def test_components_match_whole(self) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
        cast_model(model, keep_fp32="1")
        assert fp32_names(model) == {"1.weight", "1.bias"}

    def test_leaf_follows_its_tensor_but_a_parent_does_not(self) -> None:
        class Gated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))
                self.proj = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.proj(x) * self.scale.to(x.dtype)

        model = nn.Sequential(Gated(), Gated())
        report = cast_model(model, keep_fp32=["0.scale", "1.proj.bias"])
        assert fp32_names(model) == {"0.scale", "1.proj.weight", "1.proj.bias"}
        assert set(report.boundaries) == set(report.heads) == {"1.proj"}
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == FP32

    def test_container_has_its_hooks_on_top(self) -> None:
        model, batch = tiny_models.llama()
        report = cast_model(model, keep_fp32="layers.1")
        inside = [name for name in dict(model.named_modules()) if name.startswith("model.layers.1.")]
        assert "model.layers.1" in report.boundaries and not set(inside) & set(report.boundaries)
        seen = output_dtypes(model, batch)
        assert seen["model.layers.1"] == {BF16}
        assert seen["model.layers.1.input_layernorm"] == seen["model.layers.1.mlp"] == {FP32}
        assert seen["model.layers.0.input_layernorm"] == {BF16}

    def test_list_of_modules_has_hooks_on_its_items(self) -> None:
        report = cast_model(tiny_models.llama()[0], keep_fp32="layers")
        assert {"model.layers.0", "model.layers.1"} <= set(report.boundaries)
        assert "model.layers" not in report.boundaries

    @pytest.mark.parametrize(
        ("keep", "words"),
        [
            ("lm_haed", ["'lm_haed'", "lm_head"]),
            ("LM_HEAD", ["'LM_HEAD'"]),
            ("layers.7.*", ["'layers.7.*'", "layers"]),
            ("head", ["'head'", "lm_head"]),
            ("", ["''"]),
            (["lm_head", "q_porj"], ["'q_porj'", "q_proj"]),
            (nn.Conv2d, ["'Conv2d'"]),
        ],
        ids=str,
    )
    def test_no_match(self, keep: Any, words: list[str]) -> None:
        model, _ = tiny_models.llama()
        state, hooks = bits(model), hook_counts(model)
        with pytest.raises(ValueError, match="matches no module or tensor") as error:
            cast_model(model, keep_fp32=keep)
        assert all(word in str(error.value) for word in words), error.value
        assert_same_bits(bits(model), state)
        assert hook_counts(model) == hooks

    @pytest.mark.parametrize("keep", [[3], [None], [torch.Tensor], [nn.Linear(1, 1)], int])
    def test_wrong_type(self, keep: Any) -> None:
        with pytest.raises(TypeError, match=r"names \(str\) and torch.nn.Module classes"):
            cast_model(nn.Linear(1, 1), keep_fp32=keep)


class TestNamedByTheModel:
    @pytest.mark.parametrize("build", [tiny_models.t5, tiny_models.llama, tiny_models.gemma3])
    @pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
    @pytest.mark.parametrize(
        "names", [["wo"], ["q", "o_proj"], ["attn*v_proj", "Attention*v"], ["mlp.gate_proj.weight", "up"]]
    )
    def test_names_match_as_in_transformers(self, build: Any, attribute: str, names: list[str]) -> None:
        model, _ = build()
        model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = set(), set()
        plain = copy.deepcopy(model)
        cast_model(plain)
        setattr(model, attribute, set(names))
        pattern, _, _ = build_glob_alternation(names)
        expected = {key for key in model.state_dict() if pattern.search(key)}
        cast_model(model)
        assert fp32_names(model) == expected | fp32_names(plain)

    def test_tensor_named_alone_is_left_to_the_models_code(self) -> None:
        class Router(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.linear(x.float(), self.weight)

        class Base(nn.Module):
            _keep_in_fp32_modules_strict = ("gate.weight", "sinks")
            _keep_in_fp32_modules = AttributeError()

        class Block(Base):
            def __init__(self) -> None:
                super().__init__()
                self.gate = Router(4, 2, bias=False)
                self.up = nn.Linear(4, 4)
                self.sinks = nn.Parameter(torch.zeros(2))

        model = nn.ModuleDict({"block": (block := Block()), "gate": nn.Linear(4, 4)})
        report = cast_model(model)
        assert fp32_names(model) == {"block.gate.weight", "block.sinks"}
        assert not report.boundaries
        assert block.gate(torch.randn(3, 4, dtype=BF16)).dtype == FP32
