"""Models that compute with numbers among their arguments (weights, times, positions, series) train as in FP32."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from hf_lowprec.casting import cast_model, uncast_model
from hf_lowprec.casting.input_downcast import losses_mix_dtypes
from tests.support.every_architecture.architecture_check import loss_of, tiny_model
from tests.support.every_architecture.tiny_batches import offers
from tests.support.models.diffusion_models import Converting, DiT, Preconditioned, UNet
from tests.support.models.inspection import BF16, FP32, gradient_dtypes, hook_counts
from tests.support.processes import forkserver

LABELS = torch.tensor([0, 1, 2, 1])
WEIGHTS = torch.tensor([257.0, 1.00390625, 3.0078125, 2.0078125])  # each in the middle between two numbers of BF16


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
        label_weights: Tensor | None = None,
        temperature: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x).relu())
        if pos_weight is not None:
            targets = one_hot(labels, 3).to(logits.dtype)
            loss = binary_cross_entropy_with_logits(logits, targets, pos_weight=pos_weight)
        elif sample_weight is not None:
            loss = (cross_entropy(logits, labels, reduction="none") * sample_weight).sum() / sample_weight.sum()
        else:
            weights = class_weights if label_weights is None else label_weights  # both a label and a weight
            loss = cross_entropy(logits / temperature, labels, weight=weights)
        return loss, logits


@pytest.mark.parametrize("name", ["class_weights", "pos_weight", "sample_weight", "label_weights"])
def test_weights_of_a_loss_in_forward(name: str) -> None:
    torch.manual_seed(0)
    model, weights, x = Classifier(), WEIGHTS[: 4 if name == "sample_weight" else 3], torch.randn(4, 4)
    cast_model(model)
    loss, logits = model(x, LABELS, **{name: weights})
    exact = logits.detach().double()
    if name == "pos_weight":
        expected = binary_cross_entropy_with_logits(exact, one_hot(LABELS, 3).double(), pos_weight=weights.double())
    elif name == "sample_weight":
        losses = cross_entropy(exact, LABELS, reduction="none")
        expected = (losses * weights).sum() / weights.double().sum()
    else:
        expected = cross_entropy(exact, LABELS, weight=weights.double())
    assert loss.dtype == FP32
    assert abs(loss.item() - expected.item()) <= 64 * 2.0**-24 * expected.item()  # sums of a dozen terms
    loss.backward()
    assert gradient_dtypes(model) == {BF16}


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
    hooks = hook_counts(model)
    loss, logits = model(x, LABELS, temperature=torch.tensor(0.0701))
    # Divided in FP32 and rounded once, as by a number of Python's: 0.0701 in BF16 is 0.07% off.
    assert torch.equal(loss, cross_entropy((logits / 0.0701).float(), LABELS))
    assert hook_counts(model) == hooks


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
    return build(), {"x": torch.randn(2, 3, 8, 8), **given}


@pytest.mark.parametrize("name", DIFFUSION)
def test_diffusion_models_train_as_in_fp32(name: str) -> None:
    model, batch = built(name)
    exact, before = model(**batch), hook_counts(model)
    cast_model(model)
    output = model(**batch)
    # Some twenty roundings on the longest path, which add up like a root. A timestep of 999 that is rounded to
    # 1000 is off by a radian in the fastest sine, which is as large as the sine itself.
    assert (output - exact).norm() <= 20**0.5 * 2.0**-8 * exact.norm()
    output.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    hooks = hook_counts(model)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**batch), output) and hook_counts(twin) == hooks
    assert not cast_model(model).changed and hook_counts(model) == hooks
    uncast_model(model)
    assert hook_counts(model) == before and not any("_low_precision" in key for key in vars(model))
    assert model(**batch).dtype == FP32


@pytest.mark.parametrize("name", [pytest.param("EDM", marks=pytest.mark.every_case), "Flux"])
def test_compiled(name: str) -> None:
    torch.compiler.reset()
    model, batch = built(name)
    cast_model(model)
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
    for _ in range(2):
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


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, timesteps: Tensor | None = None, *, t: int = 0, **indices: Tensor) -> Tensor:
        (index,) = indices.values() if timesteps is None else (timesteps,)
        return self.linear(x) + self.table(index)


def test_integer_timesteps_are_followed_by_name_and_dtype() -> None:
    """Indices of steps are embedded; other integers, and numbers of Python, have no format to be followed."""
    model, index = Embedded(), torch.tensor([1, 2])
    cast_model(model)
    hooks = hook_counts(model)
    for given in ({"step_ids": index}, {"y": index}, {"y": index, "t": 7}):
        assert model(torch.randn(2, 4), **given).dtype == BF16
    assert hook_counts(model) == hooks
    model(torch.randn(2, 4), index)
    assert hook_counts(model) != hooks


def test_integer_timesteps_do_not_break_compiled_graphs() -> None:
    """What embeds its timesteps needs no call before it is compiled."""
    torch.compiler.reset()
    model, batch = Embedded(), (torch.randn(2, 4), torch.tensor([1, 2]))
    cast_model(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    expected = compiled(*batch)
    assert torch.equal(model(*batch), expected)  # followed from here on
    assert torch.equal(compiled(*batch), expected)


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


def tiny(name: str, model_type: str) -> tuple[Any, dict[str, Any]]:
    model = tiny_model(getattr(transformers, name), model_type)
    _, batch = next(iter(offers(model)))
    torch.manual_seed(3)
    return model, batch


def patches(model: Any) -> dict[str, Any]:
    """Of an image of 300 rows and one column: BF16 has no 257, which is a row of its own."""
    place = torch.tensor([[257.0, 1.0], [299.0, 1.0]] * 8)
    pixels = torch.randn(16, model.config.vision_config.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat((place, pixels), -1).expand(2, -1, -1).clone()}


# Numbers that are passed as they are, and more arguments.
TRANSFORMERS: dict[tuple[str, str], tuple[str, Callable[[Any], dict[str, Any]]]] = {
    ("SamModel", "sam"): (
        "input_points",
        lambda model: {"input_points": torch.rand(2, 1, 2, 2) * 30, "input_labels": torch.ones(2, 1, 2).long()},
    ),
    ("Pix2StructForConditionalGeneration", "pix2struct"): ("flattened_patches", patches),
    ("PI0ForConditionalGeneration", "pi0"): ("timestep noise", lambda model: {}),
    ("TimeSeriesTransformerForPrediction", "time_series_transformer"): (
        "past_time_features future_time_features past_values future_values",
        lambda model: {},
    ),
    ("TimesFmModelForPrediction", "timesfm"): (
        "past_values",
        lambda model: {"past_values": [1000 + torch.randn(20), torch.randn(17)], "freq": [0, 0]},
    ),
}


@pytest.mark.parametrize(("name", "model_type"), TRANSFORMERS)
def test_numbers_of_transformers_arrive_as_they_are(name: str, model_type: str) -> None:
    if model_type == "pi0" and not losses_mix_dtypes():
        pytest.skip("this torch's losses do not mix formats")
    numbers, more = TRANSFORMERS[name, model_type]
    model, batch = tiny(name, model_type)
    batch |= more(model)
    seen: dict[str, Any] = {}
    cast_model(model)
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    loss, _ = loss_of(model(**batch))
    assert all(seen[name] is batch[name] for name in numbers.split())
    loss.backward()
    assert loss.isfinite() and any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(p.grad is None or (p.grad.isfinite().all() and p.grad.dtype == p.dtype) for p in model.parameters())


def test_positions_in_floats_reach_the_rotary_embedding() -> None:
    """As Qwen3-Omni computes them, with seconds: BF16 has no 257."""
    model, _ = tiny("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker")
    cast_model(model)
    rotary = next(m for n, m in model.named_modules() if n.endswith("rotary_emb") and n.startswith("model"))
    seen: list[Tensor] = []
    rotary.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())[1]), with_kwargs=True
    )
    tokens = torch.randint(64, 96, (1, 300))
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert seen[0].dtype == FP32 and torch.equal(seen[0][0, 0], torch.arange(300.0))
