"""What passes into a cast model, and into and out of a kept module: activations are rounded, everything else is not."""

import contextlib
import copy
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import field, make_dataclass
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers.modeling_outputs import BaseModelOutput

from hf_lowprec.casting import cast_model
from hf_lowprec.casting.input_downcast import losses_mix_dtypes
from hf_lowprec.casting.module_hooks import install_model_output_upcast
from tests.support.every_architecture.tiny_configs import tiny_config
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP16, FP32, assert_downcast, gradient_dtypes, hook_counts

exact_labels = pytest.mark.skipif(not losses_mix_dtypes(), reason="this torch's losses do not mix formats")
NUMBER = torch.tensor([257.3, 0.07])


class Spy(nn.Module):
    """Remembers what reached its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Any = None, target_boxes: Any = None, *rest: Any, **named: Any) -> None:
        self.got = (x, target_boxes, rest, named)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.linear(self.conv(x).mean(-1)).squeeze(-1)
        return out if labels is None else (mse_loss(out, labels), out)


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

    def forward(self, batch: dict[str, Any], states: list[Tensor], out: Tensor, fails: bool) -> None:
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


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_activations_are_rounded_once(dtype: torch.dtype) -> None:
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
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.every_case)])
@pytest.mark.parametrize("positional", [False, True])
def test_float_labels_stay_exact(positional: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Net(), torch.randn(3, 2, 8)
    # Far from zero: rounded, they would lie up to 2^-8 * 1000, about 4, away.
    labels = torch.tensor([1000.3, 1001.7, 999.1])
    assert (labels - labels.to(BF16)).abs().max() > 1
    cast_model(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    loss, out = run(x, labels) if positional else run(x=x, labels=labels)
    # The formula in FP32 on the model's own predictions: 3 squares and their sum differ by a few 2^-24.
    expected = ((out.detach().float() - labels) ** 2).mean()
    assert loss.dtype == FP32
    assert abs(loss.item() - expected.item()) <= 8 * 2.0**-24 * expected.item()
    loss.backward()
    assert gradient_dtypes(model) == {BF16}


def test_float_labels_train_in_any_torch() -> None:
    model = Net()
    cast_model(model)
    loss, _ = model(x=torch.randn(3, 2, 8), labels=torch.randn(3))
    loss.backward()
    assert gradient_dtypes(model) == {BF16}


def same(passed: Tensor, value: Tensor) -> bool:
    return passed.data_ptr() == value.data_ptr() and passed.dtype == value.dtype


@exact_labels
def test_names_that_mean_a_reference() -> None:
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


@pytest.mark.parametrize("name", ["class_weights", "temperature", "timesteps", "sigmas", "cond", "x"])
@pytest.mark.parametrize("value", [NUMBER[0], NUMBER, torch.tensor([999.4], dtype=torch.float64)], ids=str)
def test_numbers_of_no_or_one_dimension_stay(name: str, value: Tensor) -> None:
    model = Spy()
    cast_model(model)
    given = {"inner": [value, (value,)], "other": torch.randn(2, 2)}
    model(given, value, [value], **({} if name == "x" else {name: value}))
    x, boxes, rest, named = model.got
    assert x["inner"] is given["inner"] and x["other"].dtype == BF16
    assert boxes is rest[0][0] is value and all(same(v, value) for v in named.values())


@pytest.mark.parametrize("name", ["sample_weight", "timesteps", "positions", "sigma"])
def test_numbers_of_more_dimensions_stay_by_name(name: str) -> None:
    model, value = Spy(), torch.randn(2, 3, 4)
    cast_model(model)
    model({name: value, "x": value}, **{name: value, "pixels": value})
    x, _, _, named = model.got
    assert x[name] is value and same(named[name], value) and x["x"].dtype == named["pixels"].dtype == BF16


def test_what_is_not_wider_stays_the_same_object() -> None:
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


def test_layers_of_torch_take_activations_of_any_shape() -> None:
    for model in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))):
        model.register_forward_pre_hook(lambda module, args: (args[0].double(),))  # before ours
        cast_model(model)
        assert model(torch.randn(4)).dtype == BF16


def test_only_models_round_their_inputs() -> None:
    class Inner(nn.Linear):
        main_input_name = "x"

    model = nn.Sequential(nn.Linear(4, 4), Inner(4, 4), Inner(4, 4), nn.Linear(4, 4))
    assert set(cast_model(model, keep_fp32="2").inputs) == {"", "1"}
    assert model[1](torch.randn(4)).dtype == BF16
    with pytest.raises(RuntimeError, match="dtype"):
        model[0](torch.randn(4))
    for model in (nn.LayerNorm(4), nn.Sequential(nn.LayerNorm(4)), nn.ReLU(), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        assert not cast_model(model).inputs, "nothing is in 16 bits, or a container is not called"


def test_generation_calls_the_encoder_alone() -> None:
    torch.manual_seed(0)
    model_class = transformers.WhisperForConditionalGeneration
    model = model_class(cast(transformers.WhisperConfig, tiny_config(model_class, "whisper")))
    report = cast_model(model.eval())
    assert {"", "model", "model.encoder", "model.decoder"} <= set(report.inputs)
    features = torch.randn(2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    for given in (features, features.to(BF16)):
        assert model.get_encoder()(given).last_hidden_state.dtype == BF16
    tokens = [model.generate(given, max_new_tokens=5, do_sample=False) for given in (features, features.to(BF16))]
    assert torch.equal(*tokens) and tokens[0].shape[0] == 2


def test_embeddings_as_inputs() -> None:
    model, batch = tiny_models.llama()
    tokens = batch.pop("input_ids")
    cast_model(model)
    embeddings = model.get_input_embeddings()(tokens).detach().float().requires_grad_()
    loss = model(inputs_embeds=embeddings, **batch).loss
    assert torch.equal(loss, model(input_ids=tokens, **batch).loss)
    loss.backward()
    assert embeddings.grad is not None and embeddings.grad.dtype == FP32 and embeddings.grad.any()


def test_additive_mask_of_the_lowest_number() -> None:
    model, batch = tiny_models.llama(attention="eager")  # its softmax makes NaN of a row of -inf
    cast_model(model)
    length = batch["input_ids"].shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    causal[3] = False  # a row without anything to attend to, as of padding on the left
    mask = torch.zeros(2, 1, length, length).masked_fill(~causal, torch.finfo(FP32).min)
    logits = model(batch["input_ids"], attention_mask=mask).logits
    assert logits.isfinite().all()
    assert torch.equal(logits, model(batch["input_ids"], mask).logits)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("count", [257, 263, 4111, 65_536, 100_001])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])  # Trainer's, and those of DataParallel before and after
def test_the_number_of_tokens_that_normalizes_a_loss(dtype: torch.dtype, count: int, shape: tuple[int, ...]) -> None:
    model, batch = tiny_models.llama()
    cast_model(model, dtype)
    hooks = hook_counts(model)
    positions = torch.arange(12.0)[None]  # as some models compute them, with seconds
    output = model(**batch, num_items_in_batch=torch.full(shape, float(count)), position_ids=positions)
    logits, labels = output.logits[:, :-1].double(), batch["labels"][:, 1:]
    expected = cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum") / count
    # FP32 in a sum of 19 tokens, each a log-sum of 96 exponentials: far from 2^-9, what a count may lose.
    assert output.loss.item() > 0 and abs(output.loss.item() - expected.item()) <= 128 * 2.0**-24 * expected.item()
    output.loss.sum().backward()
    assert any(p.grad.any() for p in model.parameters()) and all(p.grad.isfinite().all() for p in model.parameters())
    assert shape or hook_counts(model) == hooks


Pair = namedtuple("Pair", ["first", "second"])
Twice = type("Twice", (Pair,), {"__new__": lambda cls, value: Pair.__new__(cls, value, value)})
Titled = type("Titled", (list,), {"__init__": lambda self, title, value: self.append(value)})
Output = make_dataclass("Output", ["value", "parts", ("unset", int, field(init=False))], frozen=True)
STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, [x, x], None),
    "list": lambda x: [x, {"a": x}],
    "dict": lambda x: OrderedDict(a=x, b=(x, "text")),
    "defaultdict": lambda x: defaultdict(list, a=x),
    "namedtuple": lambda x: Pair(x, torch.arange(3)),
    "ModelOutput": lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)),
    "Twice": Twice,
    "Titled": lambda x: Titled("title", x),
    "sort": torch.sort,
    "dataclass": lambda x: Output(x, (x, 3)),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_output_structures(name: str) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Any:
            assert x.dtype == FP32
            return STRUCTURES[name](x * self.weight)

    model, x = Returns(), torch.randn(3)
    plain = model(x)
    cast_model(model, keep_fp32=Returns)
    assert_downcast(model(x), plain)
    if isinstance(plain, BaseModelOutput):
        assert model(x).last_hidden_state.dtype == BF16


@pytest.mark.parametrize("next_to_loss", [False, True])
def test_outputs_next_to_a_loss_that_is_differentiated_are_upcast_on_request_only(next_to_loss: bool) -> None:
    class Answers(nn.Module):
        def forward(self, loss: Tensor | None) -> dict[str, Any]:
            return {"logits": torch.full((2,), 3, dtype=BF16), "loss": loss}

    model = Answers()
    install_model_output_upcast(model, next_to_loss)
    loss = torch.ones(())
    assert model(loss)["logits"].dtype == (FP32 if next_to_loss else BF16)
    assert model(None)["logits"].dtype == FP32
    with torch.no_grad():
        assert model(loss)["logits"].dtype == FP32
        assert torch.equal(model(loss)["logits"], torch.full((2,), 3.0))
