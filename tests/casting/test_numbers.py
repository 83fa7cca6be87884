"""Numbers, counts, weights and positions among the arguments of a cast model arrive as they are, and it trains."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_lowprec.casting import cast_model, uncast_model
from tests.support.models import tiny_models
from tests.support.models.diffusion_models import Converting, DiT, Preconditioned, UNet
from tests.support.models.inspection import BF16, FP16, FP32, gradient_dtypes, hook_counts
from tests.support.processes import forkserver

UNIT = 2.0**-8  # BF16 has 8 significant bits, so rounding to nearest errs by at most this much of the value
FP32_UNIT = 2.0**-24


class Spy(nn.Module):
    """Remembers what reached its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Any = None, *rest: Any, **named: Any) -> None:
        self.got = (x, rest, named)


class TestTokenCounts:
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize("count", [257, 263, 4111, 65_536, 100_001])
    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])  # Trainer's, and those of DataParallel before and after
    def test_normalizer_of_a_language_model(self, dtype: torch.dtype, count: int, shape: tuple[int, ...]) -> None:
        model, batch = tiny_models.llama()
        cast_model(model, dtype)
        output = model(**batch, num_items_in_batch=torch.full(shape, float(count)))
        logits, labels = output.logits[:, :-1].double(), batch["labels"][:, 1:]
        expected = cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum") / count
        # FP32 in a sum of 19 tokens, each a log-sum of 96 exponentials: far from 2^-9, what a count may lose.
        assert abs(output.loss.item() - expected.item()) <= 128 * FP32_UNIT * expected.item()
        assert output.loss.item() > 0
        output.loss.sum().backward()
        assert any(p.grad.any() for p in model.parameters()) and all(
            p.grad.isfinite().all() for p in model.parameters()
        )


def same(passed: Tensor, value: Tensor) -> bool:
    return passed.data_ptr() == value.data_ptr() and passed.dtype == value.dtype


class TestPassed:
    NAMES = ("class_weights", "pos_weight", "sample_weight", "temperature", "timesteps", "sigmas", "cond", "x")

    @pytest.mark.parametrize("name", NAMES)
    def test_of_no_or_one_dimension(self, name: str) -> None:
        model = Spy()
        cast_model(model)
        for value in (torch.tensor(257.3), torch.tensor([257.3, 0.07]), torch.tensor([999.4], dtype=torch.float64)):
            given = {"inner": [value, (value,)], "other": torch.randn(2, 2)}
            model(given, value, [value], **({} if name == "x" else {name: value}))
            x, rest, named = model.got
            assert x["inner"] is given["inner"] and x["other"].dtype == BF16
            assert rest[0] is rest[1][0] is value and all(same(v, value) for v in named.values())

    @pytest.mark.parametrize("name", ["sample_weight", "timesteps", "positions", "bbox", "sigma"])
    def test_of_more_dimensions_by_name(self, name: str) -> None:
        model, value = Spy(), torch.randn(2, 3, 4)
        cast_model(model)
        model({name: value, "x": value}, **{name: value, "pixels": value})
        x, _, named = model.got
        assert x[name] is value and same(named[name], value) and x["x"].dtype == named["pixels"].dtype == BF16

    def test_layers_of_torch_take_activations_of_any_shape(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        cast_model(model)
        assert model(torch.randn(4)).dtype == BF16
        layer = nn.Linear(4, 4)
        cast_model(layer)
        assert layer(torch.randn(4)).dtype == BF16


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(
        self,
        x: Tensor,
        labels: Tensor,
        class_weights: Tensor | None = None,
        pos_weight: Tensor | None = None,
        sample_weight: Tensor | None = None,
        temperature: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x).relu())
        if pos_weight is not None:
            targets = nn.functional.one_hot(labels, 3).to(logits.dtype)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=pos_weight)
        elif sample_weight is not None:
            loss = (cross_entropy(logits, labels, reduction="none") * sample_weight).sum() / sample_weight.sum()
        else:
            loss = cross_entropy(logits / temperature, labels, weight=class_weights)
        return loss, logits


LABELS = torch.tensor([0, 1, 2, 1])
# Each weight lies in the middle between two numbers of BF16.
IN_LOSSES = {
    "class_weights": torch.tensor([257.0, 1.00390625, 3.0078125]),
    "pos_weight": torch.tensor([257.0, 1.00390625, 3.0078125]),
    "sample_weight": torch.tensor([257.0, 1.00390625, 3.0078125, 2.0078125]),
}


@pytest.mark.parametrize("name", IN_LOSSES)
def test_weights_of_a_loss_in_forward(name: str) -> None:
    torch.manual_seed(0)
    model, weights, x = Classifier(), IN_LOSSES[name], torch.randn(4, 4)
    assert not torch.equal(weights, weights.to(BF16).float())
    cast_model(model)
    loss, logits = model(x, LABELS, **{name: weights})
    exact = logits.detach().double()
    if name == "class_weights":
        expected = cross_entropy(exact, LABELS, weight=weights.double())
    elif name == "pos_weight":
        targets = nn.functional.one_hot(LABELS, 3).double()
        expected = nn.functional.binary_cross_entropy_with_logits(exact, targets, pos_weight=weights.double())
    else:
        losses = cross_entropy(exact, LABELS, reduction="none")
        expected = (losses * weights).sum() / weights.double().sum()
    assert loss.dtype == FP32
    assert abs(loss.item() - expected.item()) <= 64 * FP32_UNIT * expected.item()  # sums of a dozen terms
    loss.backward()
    assert gradient_dtypes(model) == {BF16}


def test_weights_of_labels_by_name() -> None:
    """What is called a label and a weight is both: not rounded, and weighed with predictions in FP32."""

    class Labelled(Classifier):
        def forward(self, x: Tensor, labels: Tensor, label_weights: Tensor) -> Tensor:  # type: ignore[override]
            return cross_entropy(self.head(self.body(x)), labels, label_weights)

    model, weights = Labelled(), IN_LOSSES["class_weights"]
    cast_model(model)
    loss = model(torch.randn(4, 4), LABELS, weights)
    loss.backward()
    assert loss.dtype == FP32 and gradient_dtypes(model) == {BF16}


def test_children_added_later_are_found() -> None:
    model = Classifier()
    cast_model(model)
    model(torch.randn(4, 4), LABELS, sample_weight=torch.rand(4))
    model.body = nn.Linear(4, 8)
    assert cast_model(model).changed
    loss, _ = model(torch.randn(4, 4, dtype=torch.float64), LABELS, sample_weight=torch.rand(4))
    assert loss.dtype == FP32 and len(model.body._forward_pre_hooks) == 1


def test_a_temperature() -> None:
    torch.manual_seed(0)
    model, x = Classifier(), torch.randn(4, 4)
    cast_model(model)
    loss, logits = model(x, LABELS, temperature=torch.tensor(0.0701))
    # Divided in FP32 and rounded once, as by a number of Python's: 0.0701 in BF16 is 0.07% off.
    assert torch.equal(loss, cross_entropy((logits / 0.0701).float(), LABELS))


IMAGE = (2, 3, 8, 8)
DIFFUSION: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "DiT": (DiT, {"t": torch.tensor([999.0, 257.0]), "y": torch.tensor([0, 1])}),
    "UNet": (UNet, {"time": torch.tensor([999.0, 257.0])}),
    "UNet of columns": (UNet, {"time": torch.tensor([[999.0], [257.0]])}),
    "DiT, integer timesteps": (DiT, {"t": torch.tensor([999, 257]), "y": torch.tensor([0, 1])}),
    "UNet, integer timesteps": (UNet, {"time": torch.tensor([999, 257])}),
    "UNet, one integer timestep": (UNet, {"time": torch.tensor(999, dtype=torch.int32)}),
    "EDM": (Preconditioned, {"sigma": torch.tensor([0.0123, 79.9])}),
    "Flux": (partial(Converting, 1000.0), {"timestep": torch.tensor([0.7123, 0.2571])}),
    "Bria, integer timestep": (partial(Converting, 1.0), {"timestep": torch.tensor(999)}),
}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    build, given = DIFFUSION[name]
    return build(), {"x": torch.randn(IMAGE), **given}


@pytest.mark.parametrize("name", DIFFUSION)
class TestDiffusion:
    def test_trains_as_in_fp32(self, name: str) -> None:
        model, batch = built(name)
        exact = model(**batch)
        cast_model(model)
        output = model(**batch)
        # Some twenty roundings on the longest path, which add up like a root. A timestep of 999 that is rounded to
        # 1000 is off by a radian in the fastest sine, which is as large as the sine itself.
        assert (output - exact).norm() <= 20**0.5 * UNIT * exact.norm()
        output.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())

    def test_once_copied_and_taken_back(self, name: str) -> None:
        model, batch = built(name)
        before = hook_counts(model)
        cast_model(model)
        output = model(**batch)
        hooks = hook_counts(model)
        assert torch.equal(model(**batch), output) and hook_counts(model) == hooks
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(**batch), output) and hook_counts(twin) == hooks
        assert not cast_model(model).changed and hook_counts(model) == hooks
        uncast_model(model)
        assert hook_counts(model) == before and not any("_low_precision" in key for key in vars(model))
        assert model(**batch).dtype == FP32


def test_layers_round_timesteps() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 4)

        def forward(self, t: Tensor) -> Tensor:
            return self.linear(t.to(self.linear.weight.dtype).unsqueeze(1))

    model = Line()
    cast_model(model)
    assert model(torch.tensor([0.3, 0.7])).dtype == BF16


@pytest.mark.parametrize("name", [pytest.param("EDM", marks=pytest.mark.every_case), "Flux"])
def test_compiled(name: str) -> None:
    torch.compiler.reset()
    model, batch = built(name)
    cast_model(model)
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
    assert torch.equal(compiled(**batch), model(**batch))
    assert torch.equal(compiled(**batch), model(**batch))


FULLGRAPH = """
import pytest, torch
from hf_lowprec import cast_model
from tests.casting.test_numbers import built
model, batch = built("EDM")
cast_model(model)
with pytest.raises(torch._dynamo.exc.Unsupported, match="call the model once before compiling it with fullgraph"):
    torch.compile(model, backend="eager", fullgraph=True)(**batch)
torch.compiler.reset()
model(**batch)
whole = torch.compile(model, backend="eager", fullgraph=True)  # after a call without it
assert torch.equal(whole(**batch), model(**batch))
"""


@pytest.mark.every_case  # compiling takes ten seconds
def test_compiled_as_one_graph(tmp_path: Path) -> None:
    """In a process of its own: what other tests have compiled decides how much of the model is traced again."""
    (tmp_path / "fullgraph.py").write_text(FULLGRAPH)
    done = forkserver.run(tmp_path / "fullgraph.py", [], timeout=200)
    assert done.returncode == 0, done.stderr


def test_integer_timesteps_are_followed_by_name_and_dtype() -> None:
    """Indices of steps are embedded; other integers, and numbers of Python, have no format to be followed."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(8, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, *, step_ids: Tensor | None = None, y: Tensor | None = None, t: int = 0) -> Tensor:
            return self.linear(x) + self.table(step_ids if y is None else y)

    model, index = Steps(), torch.tensor([1, 2])
    cast_model(model)
    hooks = hook_counts(model)
    for given in ({"step_ids": index}, {"y": index}, {"y": index, "t": 7}):
        assert model(torch.randn(2, 4), **given).dtype == BF16
    assert hook_counts(model) == hooks


def test_integer_timesteps_do_not_break_compiled_graphs() -> None:
    """What embeds its timesteps needs no call before it is compiled."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(8, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
            return self.linear(x) + self.table(timesteps)

    torch.compiler.reset()
    model, batch = Embedded(), (torch.randn(2, 4), torch.tensor([1, 2]))
    cast_model(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    expected = compiled(*batch)
    assert torch.equal(model(*batch), expected)  # followed from here on
    assert torch.equal(compiled(*batch), expected)


def test_ordinary_models_get_no_further_hooks() -> None:
    model, batch = tiny_models.llama()
    cast_model(model)
    hooks = hook_counts(model)
    positions = torch.arange(12.0)[None]  # as some models compute them, with seconds
    model(**batch, position_ids=positions, num_items_in_batch=torch.tensor(257.0)).loss.backward()
    assert hook_counts(model) == hooks
    classifier = Classifier()
    cast_model(classifier)
    hooks = hook_counts(classifier)
    classifier(torch.randn(4, 4), LABELS, temperature=torch.tensor(0.07))
    assert hook_counts(classifier) == hooks
