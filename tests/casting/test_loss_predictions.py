"""Models outside of transformers that compute a loss in `forward`: FP32 copies where nothing needs equal dtypes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lowprec.casting import cast_model, return_float32, uncast_model
from hf_lowprec.casting.hooks.loss_predictions import loss_predictions
from tests.support.models.inspection import BF16, FP32

X, Y = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(6)
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Net(nn.Module):
    """The layers that the classes below use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.attention, self.norm = nn.Linear(16, 1), nn.LayerNorm(16)
        self.words, self.things = nn.Embedding(12, 16), nn.Embedding(12, 16)
        self.decoder, self.up = nn.Linear(8, 16), nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8)])
        self.prototypes = nn.Parameter(torch.randn(8, 6))
        self.scale = nn.Parameter(torch.tensor(2.5))


class TwoTowers(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.head(x), dim=-1), F.normalize(self.other(y), dim=-1)
        scores = a @ b.T * self.scale.exp()
        return (F.cross_entropy(scores, CLASSES) + F.cross_entropy(scores.T, CLASSES)) / 2


class Pointer(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x)
        return F.cross_entropy(torch.matmul(self.head(hidden), self.other(hidden).transpose(0, 1)), CLASSES)


class Einsum(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(torch.einsum("ac,bc->ab", self.head(x), self.other(y)), CLASSES)


class Gate(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pooled = self.attention(x).softmax(0).T @ x
        return F.cross_entropy(self.head(pooled), CLASSES[:1])


class Pooling(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x)
        return F.cross_entropy(self.head(self.attention(hidden).softmax(0).T @ hidden), CLASSES[:1])


class Factors(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        score = (self.words(CLASSES) * self.things(CLASSES + 1)).sum(-1)
        return F.mse_loss(score, torch.ones_like(score))


class Variational(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, log_var = self.head(x), self.other(x)
        out = self.decoder(mean + torch.exp(0.5 * log_var))
        return F.mse_loss(out, x) - 0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()


class Functional(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(self.norm(self.body(x)), self.words.weight), CLASSES)


class Transposed(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x) @ self.words.weight.T, CLASSES)


class Prototypes(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x) @ self.prototypes, CLASSES)


class Rounding(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).to(x.dtype) @ self.prototypes, CLASSES)


class OneRound(Net):
    """Whether a variable is a copy depends on the path taken."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.head(x)
        for _ in range(2):
            h = self.up(h)
        if len(x) > 100:
            h = h * self.other(x)
        return F.cross_entropy(h @ self.other(y).T, CLASSES)


class Helper(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.head(x) @ self.prototypes

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.encode(x), CLASSES) + F.cross_entropy(self.head(y), CLASSES)


class Given(Net):
    """A function gets the module."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(product_of(self, x), CLASSES) + F.cross_entropy(self.head(y), CLASSES)


def product_of(net: Net, x: Tensor) -> Tensor:
    return net.head(x) @ net.prototypes


class Stored(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.kept = self.head(x)
        return F.cross_entropy(self.kept @ self.prototypes, CLASSES)


class Huber(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(self.body(x), y) + F.binary_cross_entropy(self.body(y).sigmoid(), x.sigmoid())


class Written(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        buffer = torch.zeros_like(y)
        buffer.index_copy_(0, CLASSES, self.body(x))
        return F.cross_entropy(buffer, CLASSES)


class Sequence(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = {}
        x = self.body(x).relu()
        x = self.norm(x)
        outputs["logits"] = self.head(x)
        loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
        return loss_function(outputs["logits"].view(-1, 8), CLASSES.view(-1))


class Several(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = [head(self.body(x)) for head in self.heads]
        loss = F.cross_entropy(outputs[0], CLASSES)
        loss += F.binary_cross_entropy_with_logits(outputs[1], F.one_hot(CLASSES, 8).to(outputs[1].dtype))
        return loss


class Lambda(Net):
    """Code that is not evaluated."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        multiply = lambda h: h @ self.prototypes  # noqa: E731
        return F.cross_entropy(multiply(self.head(x)), CLASSES)


class UnknownFunction(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(multiplied(self.head(x), self.prototypes), CLASSES)


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


UPCAST: dict[type[Net], list[str]] = {
    TwoTowers: ["head", "other"],
    Pointer: ["head", "other"],
    Einsum: ["head", "other"],
    Gate: ["head"],
    Pooling: ["head"],
    Factors: ["things", "words"],
    Variational: ["decoder"],
    Functional: [],
    Transposed: [],
    Prototypes: [],
    Rounding: [],
    OneRound: [],
    Helper: [],
    Given: [],
    Stored: [],
    Huber: [],
    Written: [],
    Sequence: ["head"],
    Several: ["heads.0", "heads.1"],
    Lambda: [],
    UnknownFunction: [],
}
"""Which layers get FP32 copies."""


def build(net: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return net()


@pytest.mark.parametrize("net", UPCAST)
def test_runs_and_is_near_fp32(net: type[Net]) -> None:
    exact, model = build(net), build(net)
    cast_model(model)
    return_float32(model)
    # The same weights and inputs, on BF16's grid, so that what differs is the arithmetic.
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    loss, expected = model(X, Y), exact(X.to(BF16).float(), Y.to(BF16).float())
    loss.backward()
    expected.backward()
    # Each of at most 8 roundings in sequence moves a number by 2⁻⁹ of its size. Scores are at most about 12 (cosines
    # times e^2.5), a loss of scores moves as far as a score does, and products of errors are negligible.
    assert abs(loss.item() - expected.item()) <= 8 * 2**-9 * max(12, expected.item())
    upcast = [name for name, module in model.named_modules() if name and module._forward_hooks and name != "norm"]
    assert sorted(upcast) == UPCAST[net]
    if upcast:
        assert loss.dtype == FP32 and loss.item() != loss.to(BF16).item()
    for (name, param), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        assert param.grad is None or (param.grad.dtype == param.dtype and param.grad.isfinite().all()), name


class BiEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        text = transformers.BertConfig(vocab_size=50, **SIZES)
        image = transformers.ViTConfig(image_size=8, patch_size=4, **SIZES)
        self.text, self.image = transformers.BertModel(text), transformers.ViTModel(image)
        self.text_projection, self.image_projection = nn.Linear(16, 8), nn.Linear(16, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.65))

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        text = F.normalize(self.text_projection(self.text(input_ids).pooler_output), dim=-1)
        image = F.normalize(self.image_projection(self.image(pixel_values).pooler_output), dim=-1)
        logits = text @ image.T * self.logit_scale.exp()
        return {"loss": F.cross_entropy(logits, torch.arange(len(logits))), "logits": logits}


def test_two_models_with_projections() -> None:
    exact, model = build(BiEncoder).eval(), build(BiEncoder).eval()
    batch = {"input_ids": torch.arange(28).view(4, 7), "pixel_values": torch.randn(4, 3, 8, 8)}
    expected = exact(**batch)["loss"]
    cast_model(model, keep_fp32="logit_scale")
    return_float32(model)
    outputs = model(**batch)
    outputs["loss"].backward()
    assert outputs["loss"].dtype == outputs["logits"].dtype == FP32
    assert torch.equal(outputs["logits"].argmax(-1), exact(**batch)["logits"].argmax(-1))
    # Normalized embeddings after about 12 roundings of 2⁻⁹ each; a cosine is off by twice that, a score by e^2.65 times
    # as much.
    assert abs(outputs["loss"] - expected) <= 2 * 12 * 2**-9 * 2.718**2.65
    assert all(module.weight.grad.any() for module in (model.text_projection, model.image_projection))


def test_a_model_inside_keeps_its_outputs() -> None:
    """Its products with what a wrapper owns stay in 16 bits."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **SIZES))
            self.prototypes = nn.Parameter(torch.randn(16, 3))

        def forward(self, input_ids: Tensor) -> Tensor:
            return F.cross_entropy(self.model(input_ids).pooler_output @ self.prototypes, torch.arange(4) % 3)

    model = build(Wrapper)
    cast_model(model)
    return_float32(model)
    model(torch.arange(28).view(4, 7)).backward()
    assert model.prototypes.grad.dtype == BF16


class Classifier(transformers.BertPreTrainedModel):
    """A model of the user's that computes a loss and returns its predictions."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.classifier = transformers.BertModel(config), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.classifier(self.bert(input_ids)[1])
        return transformers.modeling_outputs.SequenceClassifierOutput(F.cross_entropy(logits, labels), logits)


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.matrix = nn.ModuleList([model]), nn.Parameter(torch.randn(3, 3))


class Multiplies(Around):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        outputs = self.model[0](input_ids=input_ids, labels=labels)
        return outputs.loss + F.cross_entropy(outputs.logits @ self.matrix, labels)


class Adds(Around):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        outputs = self.model[0](input_ids=input_ids, labels=labels)
        return outputs.loss + outputs.logits.mean() + self.matrix.sum()


@pytest.mark.parametrize("inner", [Classifier, transformers.BertForSequenceClassification])
@pytest.mark.parametrize("around", [Multiplies, Adds])
def test_the_code_around_a_model_that_computes_its_loss(around: type[Around], inner: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = around(inner(transformers.BertConfig(vocab_size=50, num_labels=3, **SIZES)))
    cast_model(model)
    return_float32(model)
    loss = model(torch.arange(28).view(4, 7), torch.arange(4) % 3)
    loss.backward()
    assert len(model.model[0].classifier._forward_hooks) == (around is Adds)
    assert model.matrix.grad.dtype == BF16


def test_without_source() -> None:
    scope: dict[str, Any] = {"Net": Net, "F": F, "CLASSES": CLASSES}
    exec("class Built(Net):\n    def forward(self, x, y): return F.cross_entropy(self.head(x), CLASSES)", scope)
    model = build(scope["Built"])
    cast_model(model)
    assert loss_predictions(model, mixes_dtypes=True) == []
    return_float32(model)
    model(X, Y).backward()


class Positional(Net):
    def forward(self, x: Tensor, y: Tensor, /) -> Tensor:
        return F.cross_entropy(self.head(x), CLASSES)


class PositionalSelf(Net):
    def forward(self, /, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), CLASSES)


@pytest.mark.parametrize("cls", [Positional, PositionalSelf])
def test_arguments_that_are_positional_only(cls: type[Net]) -> None:
    model = build(cls)
    cast_model(model)
    assert loss_predictions(model, mixes_dtypes=True) == ["head"]


def test_losses_that_cannot_mix_dtypes() -> None:
    model = build(Variational)
    cast_model(model)
    assert loss_predictions(model, mixes_dtypes=True) == ["decoder"]
    assert loss_predictions(model, mixes_dtypes=False) == []


def test_an_inherited_forward_of_transformers_is_treated_as_theirs() -> None:
    class Mine(transformers.BertForSequenceClassification):
        pass

    model = Mine(transformers.BertConfig(vocab_size=50, num_labels=3, **SIZES))
    cast_model(model)
    return_float32(model)
    assert model(input_ids=torch.arange(28).view(4, 7), labels=torch.arange(4) % 3).loss.dtype == FP32


class Inherits(transformers.BertForSequenceClassification):
    """Computes another loss of the same predictions; torch does not mix dtypes in it."""

    weights = torch.tensor([1.0, 2.0, 3.3])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        outputs = super().forward(input_ids=input_ids)
        return F.cross_entropy(outputs.logits, labels, weight=self.weights)


class InheritsAndMultiplies(transformers.BertForSequenceClassification):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.matrix = nn.Parameter(torch.eye(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(input_ids=input_ids).logits @ self.matrix, labels)


@pytest.mark.parametrize("model_class", [Inherits, InheritsAndMultiplies])
def test_a_loss_of_what_an_inherited_forward_returns(model_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = model_class(transformers.BertConfig(vocab_size=50, num_labels=3, **SIZES))
    cast_model(model)
    return_float32(model)
    loss = model(torch.arange(28).view(4, 7), torch.arange(4) % 3)
    loss.backward()
    assert (loss.item() != loss.to(BF16).item()) == (model_class is Inherits)
    assert model.classifier.weight.grad.any()


WEIGHTS = torch.tensor([1.0, 1001.0, 3.3])
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("class_weights", WEIGHTS.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.head(self.body(x)), LABELS)  # type: ignore[no-any-return,operator]


class FunctionWeights(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), LABELS, weight=self.class_weights)


class ModuleWeights(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.body(x))
        loss = nn.CrossEntropyLoss(weight=self.class_weights)
        return loss(logits, LABELS)


class PositiveWeights(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        targets = F.one_hot(LABELS, 3).float()
        return F.binary_cross_entropy_with_logits(self.head(self.body(x)), targets, pos_weight=self.class_weights)


class LogWeights(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        weights = self.class_weights
        return F.nll_loss(F.log_softmax(self.head(self.body(x)), -1), LABELS, weights)


class PlainAttribute(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.plain = self._buffers.pop("class_weights")

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), LABELS, weight=self.plain)


class ModelWeights(transformers.BertPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.classifier = transformers.BertModel(config), nn.Linear(16, 3)
        self.register_buffer("class_weights", WEIGHTS.clone())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.bert(input_ids)[1]), labels, weight=self.class_weights)


WEIGHTED: tuple[type[Weighted], ...] = (FunctionWeights, ModuleWeights, PositiveWeights, LogWeights, PlainAttribute)


@pytest.mark.parametrize("upcasts", [False, True])
@pytest.mark.parametrize("net", WEIGHTED[:4])
def test_class_weights_are_exact(net: type[Weighted], upcasts: bool) -> None:
    model = build(net)
    report = cast_model(model)
    if upcasts:
        return_float32(model)
    assert torch.equal(model.class_weights, WEIGHTS)
    assert report.kept["class_weights"] == "weights of classes in a loss" and not report.warnings
    exact = copy.deepcopy(model)
    uncast_model(exact)
    seen: list[Tensor] = []
    model.head.register_forward_hook(lambda module, args, output: seen.append(output))
    loss = model(X)
    loss.backward()
    assert loss.dtype == FP32 and model.head.weight.grad.any()
    exact.body, exact.head = nn.Identity(), nn.Identity()
    assert torch.equal(loss, exact(seen[0]))  # the same operation on the same numbers
    assert not cast_model(model).changed


def test_weights_of_a_loss_of_16_bit_predictions_are_cast() -> None:
    class Product(Weighted):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.body(x)) @ self.matrix, LABELS, weight=self.class_weights)

    model = build(Product)
    (warning,) = cast_model(model).warnings
    return_float32(model)
    assert model.class_weights.dtype == BF16 and "keep_fp32=['class_weights']" in warning
    model(X).backward()


def test_weights_that_are_multiplied_as_well_are_cast() -> None:
    class Product(Weighted):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)[:, :3] @ self.class_weights
            return F.cross_entropy(self.head(self.body(x)), LABELS, weight=self.class_weights) + hidden.mean()

    model = build(Product)
    cast_model(model)
    return_float32(model)
    assert model.class_weights.dtype == BF16
    model(X).backward()


@pytest.mark.parametrize("make", [lambda: cast_model, lambda: lambda model: cast_model(model, keep_fp32="head")])
def test_weights_of_other_kinds(make: Callable[[], Callable[[nn.Module], Any]]) -> None:
    for net in (PlainAttribute, FunctionWeights):
        model = build(net)
        make()(model)
        return_float32(model)
        model(X).backward()


def test_weights_in_a_model_of_the_users() -> None:
    torch.manual_seed(0)
    model = ModelWeights(transformers.BertConfig(vocab_size=50, **SIZES))
    cast_model(model)
    return_float32(model)
    loss = model(torch.arange(42).view(6, 7), LABELS)
    loss.backward()
    assert loss.dtype == model.class_weights.dtype == FP32 and model.classifier.weight.grad.any()
