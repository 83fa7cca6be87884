"""FP32 tensors handed to a cast model: rounded where they enter it, unless a loss is measured against them."""

import contextlib
import copy
from collections import OrderedDict, defaultdict
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.casting import cast_model
from hf_lowprec.casting.input_downcast import losses_mix_dtypes
from tests.support.models.inspection import (
    BF16,
    FP16,
    FP32,
    gradient_dtypes,
    hook_counts,
)

exact_labels = pytest.mark.skipif(not losses_mix_dtypes(), reason="this torch's losses do not mix formats")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        out = self.linear(self.conv(x).mean(-1)).squeeze(-1)
        return out if labels is None else (nn.functional.mse_loss(out, labels), out)


class Spy(nn.Module):
    """Remembers what reached its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Any = None, target_boxes: Any = None, *rest: Any, **named: Any) -> None:
        self.got = (x, target_boxes, rest, named)


AS_DICT = {"__iter__": lambda self: iter(vars(self)), "pop": lambda self, key: vars(self).pop(key)}
AS_DICT |= {
    "__getitem__": lambda self, key: vars(self)[key],
    "__setitem__": lambda self, key, value: vars(self).update({key: value}),
}
Batch = make_dataclass("Batch", ["x", "old", "parts"], namespace=AS_DICT)


class Writes(nn.Module):
    """Writes into its arguments numbers that are exact in every dtype, and fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(2 * torch.eye(2))

    def forward(self, batch: dict[str, Any], states: list[torch.Tensor], out: torch.Tensor, fails: bool) -> None:
        batch["again"], batch["y"] = batch["x"], batch["x"] @ self.weight
        batch["parts"].insert(0, batch.pop("old"))
        states[1:] = [batch["y"], states[0]]
        out.copy_(batch["x"].add_(1))
        assert not fails


def written(module: nn.Module, dtype: torch.dtype, make: Any, fails: bool) -> list[Any]:
    """What the arguments of `Writes` are after a call: which of the caller's tensors, and what values."""
    x, old, out = (torch.full((2, 2), value, dtype=dtype) for value in (1.0, 2.0, 3.0))
    batch, states = make({"x": x, "old": old, "parts": [x]}), [x, old]
    with contextlib.suppress(AssertionError):
        module(batch, states, out=out, fails=fails)
    entries = [batch["x"], batch["again"], batch["y"], *batch["parts"], *states, out]
    return [*batch, *([entry is x, entry is old, entry.tolist()] for entry in entries)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("make", [dict, OrderedDict, lambda entries: defaultdict(list, entries), lambda e: Batch(**e)])
@pytest.mark.parametrize("kept", [False, True], ids=["rounded", "upcast"])
def test_what_forward_writes_into_its_arguments_reaches_the_caller(kept: bool, make: Any, fails: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Writes())
    module, expected = model[1], written(model[1], FP32, make, fails)
    cast_model(model if kept else module, keep_fp32="1" if kept else ())
    hooks = dict(module._forward_hooks)
    assert written(module, BF16 if kept else FP32, make, fails) == expected
    assert dict(module._forward_hooks) == hooks


class TestPlain:
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_convolution_and_linear(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        model, x = Net(), torch.randn(3, 2, 8, dtype=torch.float64)
        exact = copy.deepcopy(model).double()
        # Every term of the result is a product of an input and two weights, and the output of the convolution,
        # its mean and the result are rounded: with the bias, at most 6 factors 1 + u, each on a sum that is no
        # larger than the same sum of absolute values.
        with torch.no_grad():
            expected = exact(x)
            for parameter in exact.parameters():
                parameter.abs_()
            bound = exact(x.abs())
        cast_model(model, dtype)
        unit = torch.finfo(dtype).eps / 2
        assert model(x).dtype == dtype
        assert ((model(x).double() - expected).abs() <= ((1 + unit) ** 6 - 1) * bound).all()
        model(x.float()).sum().backward()
        assert gradient_dtypes(model) == {dtype}

    @exact_labels
    @pytest.mark.parametrize("positional", [False, True])
    def test_float_labels_stay_exact(self, positional: bool) -> None:
        torch.manual_seed(0)
        model, x = Net(), torch.randn(3, 2, 8)
        # Far from zero: rounded, they would lie up to 2^-8 * 1000, about 4, away.
        labels = torch.tensor([1000.3, 1001.7, 999.1])
        assert (labels - labels.to(BF16)).abs().max() > 1
        cast_model(model)
        loss, out = model(x, labels) if positional else model(x=x, labels=labels)
        # The formula in FP32 on the model's own predictions: 3 squares and their sum differ by a few 2^-24.
        expected = ((out.detach().float() - labels) ** 2).mean()
        assert loss.dtype == FP32
        assert abs(loss.item() - expected.item()) <= 8 * 2.0**-24 * expected.item()
        loss.backward()
        assert gradient_dtypes(model) == {BF16}

    @exact_labels
    def test_float_labels_of_a_regression_by_transformers(self) -> None:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        config.num_labels, config.problem_type = 1, "regression"
        model = transformers.BertForSequenceClassification(config).eval()
        cast_model(model)
        labels = torch.tensor([1000.3, 1001.7])
        outputs = model(input_ids=torch.arange(8).view(2, 4), labels=labels)
        expected = ((outputs.logits.detach().float().squeeze() - labels) ** 2).mean()
        assert abs(outputs.loss.item() - expected.item()) <= 8 * 2.0**-24 * expected.item()
        outputs.loss.backward()
        assert model.classifier.weight.grad.isfinite().all() and model.classifier.weight.grad.any()

    def test_float_labels_train_in_any_torch(self) -> None:
        model = Net()
        cast_model(model)
        loss, _ = model(x=torch.randn(3, 2, 8), labels=torch.randn(3))
        loss.backward()
        assert gradient_dtypes(model) == {BF16}

    @exact_labels
    def test_names_that_mean_a_reference(self) -> None:
        model, x = Spy(), torch.randn(3, 2)
        cast_model(model)
        model(x, x, x, x, labels=x, start_Labels=[x], pixels=x, options={"target": (x,), "other": (x,)})
        first, boxes, rest, named = model.got
        assert len(rest) == 2 and rest[0].dtype == rest[1].dtype == first.dtype == BF16
        assert named["pixels"].dtype == named["options"]["other"][0].dtype == BF16
        assert boxes is named["labels"] is named["start_Labels"][0] is named["options"]["target"][0] is x
        model({"x": x, "labels": {"boxes": x}}, labels=[{"boxes": x}])
        (first, _, _, named) = model.got
        assert first["x"].dtype == BF16 and first["labels"]["boxes"] is x and named["labels"][0]["boxes"] is x

    def test_what_is_not_wider_stays_the_same_object(self) -> None:
        model = Spy()
        cast_model(model)
        values = [
            *(torch.arange(3), torch.ones(3, dtype=torch.bool), torch.randn(3, dtype=torch.complex64)),
            *(torch.randn(3, dtype=BF16), torch.randn(3, dtype=FP16), torch.randn(3).to(torch.float8_e4m3fn)),
            *(None, 1.5, "text", [torch.arange(3), {"a": (torch.randn(3, dtype=BF16),)}], object()),
        ]
        for value in values:
            model(value, None, value, pixels=value)
            got, _, (more,), named = model.got
            assert got is more is named["pixels"] is value


class TestWhere:
    def test_only_models_have_one(self) -> None:
        class Inner(nn.Linear):
            main_input_name = "x"

        model = nn.Sequential(nn.Linear(4, 4), Inner(4, 4), Inner(4, 4), nn.Linear(4, 4))
        report = cast_model(model, keep_fp32="2")
        assert set(report.inputs) == {"", "1"}
        text = str(report)
        assert "inputs rounded" in text and "(model): to torch.bfloat16, except labels and targets" in text
        assert model[1](torch.randn(4)).dtype == BF16
        with pytest.raises(RuntimeError, match="dtype"):
            model[0](torch.randn(4))

    def test_none_where_nothing_is_in_16_bits(self) -> None:
        for model in (nn.LayerNorm(4), nn.Sequential(nn.LayerNorm(4)), nn.ReLU()):
            assert not cast_model(model).inputs
        everything = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        x = torch.randn(2, 4)
        assert not cast_model(everything, keep_fp32="*").inputs
        # The first linear's output is rounded for the second: that, and not the input, is all that is lost.
        first, second = copy.deepcopy(everything)
        for module in (first, second):
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        assert torch.equal(everything(x), second(first(x).to(BF16).float()))

    def test_containers_are_not_called(self) -> None:
        model = nn.ModuleDict({"one": nn.Linear(2, 2)})
        assert not cast_model(model).inputs and hook_counts(model) == [(0, 0), (0, 0)]

    def test_hooks_of_others_that_come_before(self) -> None:
        model = nn.Linear(4, 4)
        model.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        cast_model(model)
        assert model(torch.randn(2, 4)).dtype == BF16


class TestComposition:
    @pytest.mark.every_case
    def test_compile(self) -> None:
        torch.compiler.reset()
        model, x = Net(), torch.randn(3, 2, 8)
        cast_model(model)
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        labels = torch.full((3,), 1000.3)
        loss, _ = compiled(x, labels=labels)
        assert torch.equal(loss, model(x, labels=labels)[0])
        loss.backward()
        assert gradient_dtypes(model) == {BF16}
        assert not cast_model(compiled).changed

    def test_compiled_before_the_cast(self) -> None:
        torch.compiler.reset()
        model = Net()
        compiled: Any = torch.compile(model, backend="eager")
        assert cast_model(compiled).inputs == ("_orig_mod",)
        assert compiled(torch.randn(3, 2, 8)).dtype == model(torch.randn(3, 2, 8)).dtype == BF16
