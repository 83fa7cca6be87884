"""Torch's losses in the `forward` of a user's model compute in FP32, on what the model has computed in 16 bits."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hf_lowprec.casting import cast_model, return_float32, uncast_model
from tests.support.chosen_cases import nightly_except
from tests.support.models.inspection import BF16, COPIES, FP16, FP32, copy_of

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
SEQUENCE = torch.tensor([[1, 2]])
TARGETS = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.tensor([1.0, 1001.0, 3.3])
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXTS = {"input_ids": torch.arange(28).view(4, 7), "labels": torch.arange(4) % 3}


class Net(nn.Module):
    """Calls a method that computes the loss; the models below do it otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.matrix = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("class_weights", WEIGHTS.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x))
        return self.loss(logits), logits

    def loss(self, predictions: Tensor) -> Tensor:
        return cross_entropy(predictions, CLASSES)


class Function(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x))
        return F.cross_entropy(logits, CLASSES), logits


class BuiltWithWeights(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x))
        return CrossEntropyLoss(self.class_weights, label_smoothing=0.1)(logits, CLASSES), logits


class Product(Net):
    """A product needs equal dtypes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = multiplied(self.head(self.body(x)), self.matrix)
        return F.cross_entropy(logits, CLASSES, weight=self.class_weights), logits


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    return (a - a.logsumexp(-1, keepdim=True)).exp() @ b


class InTheBaseClass(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(x)
        return loss * 2, logits


class Decorated(Net):
    forward = torch.enable_grad()(Net.forward)


def smoothed_by_hand(predictions: Tensor) -> Tensor:
    logarithms = predictions.log_softmax(-1)
    return -0.9 * logarithms[range(6), CLASSES].mean() - 0.1 * logarithms.mean()


def exponentials_by_hand(predictions: Tensor) -> Tensor:
    return (torch.logsumexp(predictions, -1) - predictions.gather(-1, CLASSES[:, None])[:, 0]).mean()


class Objective(nn.Module):
    def forward(self, predictions: Tensor) -> Tensor:
        return exponentials_by_hand(predictions)


def in_an_attribute(loss: Callable[[Tensor], Tensor], name: str) -> type[Net]:
    def init(self: Any) -> None:
        Net.__init__(self)
        self.loss = copy.deepcopy(loss)

    return type(name, (Net,), {"__init__": init})


def in_method(predictions: Tensor) -> Tensor:
    return F.cross_entropy(predictions, CLASSES)


ATTRIBUTES: dict[str, Callable[[Tensor], Tensor]] = {
    "Attribute": in_method,
    "Partial": functools.partial(F.cross_entropy, target=CLASSES, label_smoothing=0.1),
    "Submodule": Objective(),
    "Exponentials": exponentials_by_hand,
    "Smoothed": smoothed_by_hand,
    "Logarithms": lambda predictions: F.nll_loss(F.log_softmax(predictions, -1), CLASSES),
    "SeveralLabels": lambda predictions: F.binary_cross_entropy_with_logits(predictions, TARGETS),
    "Divergence": lambda predictions: F.kl_div(predictions.log_softmax(-1), TARGETS, reduction="sum"),
    # Without FP32 copies, torch does not differentiate this loss of two dtypes,
    "Regression": lambda predictions: F.huber_loss(predictions, TARGETS),
    # and these two take no 16-bit numbers.
    "Distances": lambda predictions: torch.cdist(predictions, predictions.flip(0)).square().mean(),
    "Sequences": lambda predictions: F.ctc_loss(predictions.log_softmax(-1)[:, None], SEQUENCE, (6,), (2,)),
}
LOSSES: dict[type[Net], Callable[[Tensor], Tensor]] = {
    **dict.fromkeys((Net, Function, Decorated), in_method),
    InTheBaseClass: lambda p: 2 * in_method(p),
    BuiltWithWeights: lambda p: F.cross_entropy(p, CLASSES, WEIGHTS.double(), label_smoothing=0.1),
    Product: lambda p: F.cross_entropy(p, CLASSES, WEIGHTS.double()),
    **{in_an_attribute(loss, name): loss for name, loss in ATTRIBUTES.items()},
}
"""The loss of each model, of its predictions in FP64."""


def build(net: type[nn.Module], dtype: torch.dtype = BF16) -> Any:
    torch.manual_seed(0)
    model = net()
    cast_model(model, dtype)
    return model


@pytest.mark.parametrize(
    ("net", "dtype", "compiled"),
    [
        *((net, dtype, False) for net in LOSSES for dtype in (BF16, FP16)),
        *nightly_except(  # torch compiles no `ctc_loss` in one graph
            [(BuiltWithWeights, BF16, True)], [(net, BF16, True) for net in LOSSES if net.__name__ != "Sequences"]
        ),
    ],
)
def test_the_loss_is_that_of_the_16_bit_predictions(net: type[Net], dtype: torch.dtype, compiled: bool) -> None:
    model = build(net, dtype)
    torch.compiler.reset()
    loss, predictions = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(X)
    expected = LOSSES[net](predictions.detach().double())
    assert loss.dtype == FP32 and predictions.dtype == dtype
    # Sums of at most 18 terms in FP32, each a few roundings of 2^-24; one in 16 bits is off by up to 2^-11.
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    loss.backward()
    assert {p.grad.dtype for p in (model.body.weight, model.head.weight)} == {dtype} and model.head.weight.grad.any()


@pytest.mark.parametrize("through", COPIES)
def test_copies(through: str) -> None:
    model = build(BuiltWithWeights)
    twin = copy_of(model, through)
    assert not cast_model(twin).changed
    assert list(inspect.signature(twin.forward).parameters) == ["x"]
    with torch.no_grad():
        twin.head.weight.zero_()  # a copy computes with its own weights
    assert torch.equal(model(X)[0], build(BuiltWithWeights)(X)[0]) and not torch.equal(twin(X)[0], model(X)[0])


@pytest.mark.parametrize("cast_first", [True, False])
def test_accelerates_hooks_come_and_go(cast_first: bool) -> None:
    class Fresh(Net):  # whose `forward` no cast has touched
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return Net.forward(self, x)

    model: Any = Fresh()
    if cast_first:
        cast_model(model)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    cast_model(model)
    for change in (lambda model: model, remove_hook_from_module, copy.deepcopy):
        model = change(model)
        nn.init.zeros_(model.head.weight)
        loss, logits = model(X)
        assert loss.dtype == FP32 and torch.equal(logits, model.head.bias.expand(6, 3))


def test_accelerates_autocast_comes_and_goes() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(build(Net))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False)(X)[0].dtype == FP32


def test_a_replica_computes_with_its_own_weights() -> None:
    """As `DataParallel` and `copy.copy` make them: other modules in a copy of the attributes."""
    model = build(Net)
    replica = model._replicate_for_data_parallel()
    replica.head = copy.deepcopy(model.head)
    torch.nn.init.zeros_(replica.head.weight)
    with torch.no_grad():
        loss, logits = replica(X.to(BF16))
    assert loss.dtype == FP32 and torch.equal(logits, replica.head.bias.expand(6, 3))


def test_uncast_gives_back_the_forward() -> None:
    model = build(Function)
    uncast_model(model)
    assert "forward" not in vars(model) and model(X)[0].dtype == FP32
    assert cast_model(model).changed and model(X)[0].dtype == FP32 != model(X)[1].dtype

    model = Function()
    model.forward = own = lambda x: x  # type: ignore[method-assign,assignment]
    cast_model(model)
    assert model.forward is not own
    uncast_model(model)
    assert model.forward is own


def test_torch_export() -> None:
    model = build(BuiltWithWeights)
    exported = torch.export.export(model, (X,)).module()
    assert torch.equal(exported(X)[0], model(X)[0])
    model = build(Net)
    assert torch.equal(torch.fx.symbolic_trace(model)(X.to(BF16))[1], model(X)[1])


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        aside = F.mse_loss(hidden, x)
        return aside + checkpoint(self.loss, hidden, self.class_weights, use_reentrant=self.reentrant)

    def loss(self, hidden: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), CLASSES, weight=weights)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_in_a_checkpoint_computes_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, reentrant: bool, compiled: bool
) -> None:
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    model = build(Checkpointed)
    torch.compiler.reset()
    loss = (torch.compile(model, backend="aot_eager") if compiled else model)(X)
    loss.backward()
    hidden = model.body(X.to(BF16))
    head, weights = copy.deepcopy(model.head), model.class_weights
    F.cross_entropy(head(hidden.detach()), CLASSES, weight=weights).backward()
    assert loss.dtype == FP32  # of the loss outside
    assert weights.dtype == BF16 and torch.equal(model.head.weight.grad, head.weight.grad)


def test_modules_inside_and_losses() -> None:
    """A model inside gets it as well; a loss module is kept in FP32 as a whole."""

    class Criterion(nn.Module):
        def forward(self, predictions: Tensor) -> Tensor:
            return F.cross_entropy(predictions * 2, CLASSES)

    model = nn.ModuleDict({"net": Function(), "criterion": Criterion()})
    report = cast_model(model)
    assert set(report.losses) == {"net", "criterion"}
    loss, logits = model["net"](X.to(BF16))
    assert loss.dtype == FP32
    assert torch.equal(model["criterion"](logits), F.cross_entropy(logits.float() * 2, CLASSES))
    assert "forward" not in vars(model["criterion"])


class Weights(Net):
    """Only vectors that do not train, that `forward` names, and that have "weight" in their name weigh classes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos_weight", WEIGHTS.view(3, 1).clone())
        self.frozen_weights = nn.Parameter(WEIGHTS.clone(), requires_grad=False)
        self.layer_weights = nn.Parameter(WEIGHTS.clone())
        for name in ("weight_matrix", "other_weights", "alpha"):
            self.register_buffer(name, WEIGHTS.expand(3, 3).clone() if "matrix" in name else WEIGHTS.clone())

    def forward(self, x: Tensor) -> Tensor:
        _ = self.class_weights, self.pos_weight, self.frozen_weights, self.layer_weights, self.weight_matrix
        return F.cross_entropy(self.head(self.body(x)), CLASSES, weight=self.alpha)  # type: ignore[arg-type]


def test_class_weights_are_exact() -> None:
    model = Weights()
    report = cast_model(model)
    names = ("class_weights", "pos_weight", "frozen_weights")
    assert report.kept == dict.fromkeys(names, "weights of classes in a loss")
    assert all(torch.equal(getattr(model, name).flatten(), WEIGHTS) for name in names)
    assert any("keep_fp32=" in warning and "'alpha'" in warning for warning in report.warnings)
    assert model(X).dtype == FP32


class Classifier(transformers.BertPreTrainedModel):
    """A model of the user's that computes a loss and returns its predictions."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.classifier = transformers.BertModel(config), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.classifier(self.bert(input_ids)[1])
        return transformers.modeling_outputs.SequenceClassifierOutput(F.cross_entropy(logits, labels), logits)


class Adds(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.matrix = nn.ModuleList([model]), nn.Parameter(torch.randn(3, 3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        outputs = self.model[0](input_ids=input_ids, labels=labels)
        return outputs.loss, outputs.logits.mean() + self.matrix.sum()


class Multiplies(Adds):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        outputs = self.model[0](input_ids=input_ids, labels=labels)
        return outputs.loss, (outputs.logits @ self.matrix).mean()


class MultipliesByFunction(Adds):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        outputs = self.model[0](input_ids=input_ids, labels=labels)
        return outputs.loss, torch.matmul(outputs.logits, self.matrix).mean()


@pytest.mark.parametrize("inner", [Classifier, transformers.BertForSequenceClassification])
@pytest.mark.parametrize("around", [Multiplies, MultipliesByFunction, Adds])
def test_the_code_around_a_model_that_computes_its_loss(around: type[Adds], inner: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = around(inner(transformers.BertConfig(vocab_size=50, num_labels=3, **SIZES)))
    cast_model(model)
    return_float32(model)
    loss, other = model(**TEXTS)
    (loss + other).backward()
    assert loss.item() != loss.to(BF16).item()
    assert model.matrix.grad.dtype == BF16


class Inherits(transformers.BertForSequenceClassification):
    """Computes another loss of the predictions that the inherited `forward` makes."""

    weights = WEIGHTS

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        outputs = super().forward(input_ids=input_ids)
        return F.cross_entropy(outputs.logits, labels, weight=self.weights)


class InheritsAndMultiplies(transformers.BertForSequenceClassification):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.matrix = nn.Parameter(torch.randn(3, 3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(input_ids=input_ids).logits @ self.matrix, labels)


class Mine(transformers.BertForSequenceClassification):
    pass


@pytest.mark.parametrize("model_class", [Inherits, InheritsAndMultiplies, Mine])
def test_subclasses_of_models(model_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = model_class(transformers.BertConfig(vocab_size=50, num_labels=3, **SIZES))
    cast_model(model)
    return_float32(model)
    outputs = model(**TEXTS)
    loss = outputs if isinstance(outputs, Tensor) else outputs.loss
    loss.backward()
    assert loss.dtype == FP32 and loss.item() != loss.to(BF16).item()
    assert model.classifier.weight.grad.any()
