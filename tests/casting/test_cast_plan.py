"""The plan of a cast, apart from carrying it out: what it says, and that making it changes nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_lowprec.casting import cast_model, make_plan
from hf_lowprec.casting.cast_plan import CastPlan, HookPlan
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP16, FP32, assert_same_bits, bits, dtypes, hook_counts


def actions(plan: CastPlan) -> dict[str, tuple[str, torch.dtype, str]]:
    return {tensor.name: (tensor.action, tensor.dtype, tensor.reason) for tensor in plan.tensors}


class Net(nn.Module):
    """A part for several rules: cast, kept by class, kept by the caller, not floating."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.lm_head = nn.Linear(4, 2, bias=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.proj(x)))


def test_every_tensor_has_a_dtype_and_a_reason() -> None:
    assert actions(make_plan(Net(), BF16, ["lm_head"])) == {
        "steps": ("leave", torch.int64, "Tensor of torch.int64"),
        "proj.weight": ("cast", BF16, "no rule keeps it"),
        "norm.weight": ("keep", FP32, "norm (LayerNorm)"),
        "lm_head.weight": ("keep", FP32, "keep_fp32 'lm_head'"),
    }


def test_every_hook_is_planned() -> None:
    plan = make_plan(Net(), BF16, ["lm_head"])
    assert plan.hooks == (
        HookPlan("norm", "upcast inputs", "norm (LayerNorm)"),
        HookPlan("norm", "downcast outputs", "norm (LayerNorm)"),
        HookPlan("lm_head", "upcast inputs", "keep_fp32 'lm_head'"),
        HookPlan("", "torch losses in FP32", "the model's own code"),
        HookPlan("proj", "downcast inputs", "written before an output head, whose output is FP32"),
        HookPlan("", "downcast inputs", "the model, called with the data"),
        HookPlan("", "warn of 16-bit losses", "the model"),
    )
    assert plan.kept == {"norm": "norm (LayerNorm)", "lm_head": "keep_fp32 'lm_head'"}
    assert plan.heads == ("lm_head",) and plan.losses == ()


def test_text() -> None:
    lines = str(make_plan(Net(), FP16)).splitlines()
    assert lines[0] == "plan of a cast to torch.float16:"
    words = [" ".join(line.split()) for line in lines[1:]]
    assert "tensor proj.weight: cast torch.float16 no rule keeps it" in words
    assert "tensor norm.weight: keep torch.float32 norm (LayerNorm)" in words
    assert "module norm: upcast inputs norm (LayerNorm)" in words
    assert "module (model): downcast inputs the model, called with the data" in words


@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.t5, tiny_models.bert])
def test_a_plan_changes_nothing_and_a_cast_does_what_it_says(build: Any) -> None:
    model, _ = build()
    state, hooks, names = bits(model), hook_counts(model), [sorted(vars(m)) for m in model.modules()]
    plan = make_plan(model)
    assert_same_bits(bits(model), state)
    assert hook_counts(model) == hooks and [sorted(vars(m)) for m in model.modules()] == names

    report = cast_model(model)
    tensors = dtypes(model)
    assert {name: dtype for name, (_, dtype, _) in actions(plan).items()}.items() <= tensors.items()
    assert report.kept == plan.kept and set(report.boundaries) == set(plan.hooks_of("upcast inputs"))
    expected = [0, 0]
    for hook in plan.hooks:
        expected[0] += hook.kind in ("upcast inputs", "downcast inputs")
        expected[1] += hook.kind in (
            "downcast outputs",
            "upcast outputs",
            "warn of 16-bit losses",
        )
    before, after = (list(map(sum, zip(*counts, strict=True))) for counts in (hooks, hook_counts(model)))
    assert [new - old for new, old in zip(after, before, strict=True)] == expected


def test_a_cast_model_has_the_same_plan() -> None:
    model, _ = tiny_models.llama()
    fresh = copy.deepcopy(model)
    cast_model(model, keep_fp32="lm_head")
    assert make_plan(model) == make_plan(fresh, BF16, ["lm_head"])
