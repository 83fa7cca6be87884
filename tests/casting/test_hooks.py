"""What passes into and out of a module that stays in FP32."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import field, make_dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from hf_lowprec.casting import cast_model
from hf_lowprec.casting.module_hooks import install_model_output_upcast
from tests.support.models.inspection import BF16, FP32, assert_downcast

Pair = namedtuple("Pair", ["first", "second"])
Twice = type("Twice", (Pair,), {"__new__": lambda cls, value: Pair.__new__(cls, value, value)})
Titled = type("Titled", (list,), {"__init__": lambda self, title, value: self.append(value)})
Output = make_dataclass("Output", ["value", "parts", ("unset", int, field(init=False))], frozen=True)


class Returns(nn.Module):
    """Returns what `make` builds from its input, after checking that the input came in FP32."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        assert x.dtype == FP32
        return self.make(x * self.weight)


@pytest.mark.parametrize("next_to_loss", [False, True])
def test_outputs_next_to_a_loss_that_is_differentiated_are_upcast_on_request_only(next_to_loss: bool) -> None:
    class Answers(nn.Module):
        def forward(self, loss: torch.Tensor | None) -> dict[str, Any]:
            return {"logits": torch.full((2,), 3, dtype=BF16), "loss": loss}

    model = Answers()
    install_model_output_upcast(model, next_to_loss)
    loss = torch.ones(())
    assert model(loss)["logits"].dtype == (FP32 if next_to_loss else BF16)
    assert model(None)["logits"].dtype == FP32
    with torch.no_grad():
        assert model(loss)["logits"].dtype == FP32
        assert torch.equal(model(loss)["logits"], torch.full((2,), 3.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, [x, x], None),
        lambda x: [x, {"a": x}],
        lambda x: OrderedDict(a=x, b=(x, "text")),
        lambda x: defaultdict(list, a=x),
        lambda x: Pair(x, torch.arange(3)),
        lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)),
        Twice,
        lambda x: Titled("title", x),
        torch.sort,
        lambda x: Output(x, (x, 3)),
    ],
    ids=["tuple", "list", "dict", "defaultdict", "namedtuple", "ModelOutput", "Twice", "Titled", "sort", "dataclass"],
)
def test_output_structures(make: Any) -> None:
    model = Returns(make)
    x = torch.randn(3)
    plain = model(x)
    cast_model(model, keep_fp32=Returns)

    assert_downcast(model(x), plain)
    if isinstance(plain, BaseModelOutput):
        assert model(x).last_hidden_state.dtype == BF16


def test_hooks_of_others_see_the_cast_output() -> None:
    norm, seen = nn.LayerNorm(4), []
    norm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    cast_model(norm)
    norm(torch.randn(2, 4, dtype=BF16))
    assert seen == [BF16]
