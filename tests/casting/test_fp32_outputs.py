"""Models that compute their loss in `forward` get exact FP32 copies of their predictions, and so an FP32 loss."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hf_lowprec.casting import cast_model, uncast_model
from hf_lowprec.casting.input_downcast import losses_mix_dtypes
from hf_lowprec.casting.losses import computes_loss_itself, upcast_predictions
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP32, output_dtypes

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
TOKENS = torch.arange(3, 35).view(4, 8)
CLASSES = torch.tensor([0, 1, 2, 0])


def upcast(model: nn.Module) -> Any:
    cast_model(model)
    upcast_predictions(model, BF16)
    return model


def t5() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**size, dropout_rate=0.0, decoder_start_token_id=0)
    )


def by_class(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def built(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{re.sub('For.*', '', name)}Config")
    return getattr(transformers, name)(config(**SIZES, **settings))


def encoder_and_decoder() -> Any:
    """The decoder is the last child, and its own head makes the predictions; its caches and states are no matter."""
    decoder = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(transformers.BertConfig(**SIZES), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return transformers.EncoderDecoderModel(config)


def albert_loss(outputs: Any) -> Tensor:
    return by_class(outputs.prediction_logits, TOKENS) + by_class(outputs.sop_logits, CLASSES % 2)


def span_loss(outputs: Any) -> Tensor:
    return (cross_entropy(outputs.start_logits, CLASSES) + cross_entropy(outputs.end_logits, CLASSES + 1)) / 2


SEVERAL = nn.functional.one_hot(CLASSES, 3).float()
NUMBERS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[], Any], dict[str, Tensor], Callable[[Any], Tensor]]] = {
    "the head before the base": (
        lambda: built("XLMRobertaForSequenceClassification", num_labels=3),
        {"labels": CLASSES},
        lambda outputs: by_class(outputs.logits, CLASSES),
    ),
    "several at once": (
        lambda: built("BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        {"labels": SEVERAL},
        lambda outputs: binary_cross_entropy_with_logits(outputs.logits, SEVERAL),
    ),
    "regression": (
        lambda: built("BertForSequenceClassification", num_labels=3, problem_type="regression"),
        {"labels": NUMBERS},
        lambda outputs: mse_loss(outputs.logits, NUMBERS),
    ),
    "masked tokens, tied": (
        lambda: built("BertForMaskedLM", num_labels=3),
        {"labels": TOKENS},
        lambda outputs: by_class(outputs.logits, TOKENS),
    ),
    "T5": (t5, {"labels": TOKENS}, lambda outputs: by_class(outputs.logits, TOKENS)),
    "a model inside": (encoder_and_decoder, {"labels": TOKENS}, lambda outputs: by_class(outputs.logits, TOKENS)),
    "two losses of two heads": (
        lambda: built("AlbertForPreTraining", embedding_size=16, num_labels=2, classifier_dropout_prob=0.0),
        {"labels": TOKENS, "sentence_order_label": CLASSES % 2},
        albert_loss,
    ),
    "other references than labels": (
        lambda: built("BertForQuestionAnswering", num_labels=2),
        {"start_positions": CLASSES, "end_positions": CLASSES + 1},
        span_loss,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_fp32_on_16_bit_predictions(name: str) -> None:
    build, references, loss = CASES[name]
    if any(value.is_floating_point() for value in references.values()) and not losses_mix_dtypes():
        pytest.skip("this torch's losses do not mix formats")
    plain, model = build(), upcast(build())
    cast_model(plain)
    outputs, rounded = (m(input_ids=TOKENS, **references) for m in (model, plain))
    for key in [key for key in outputs if "logits" in key]:
        assert outputs[key].dtype == FP32 and torch.equal(outputs[key], rounded[key].float())  # exact copies
    assert outputs.loss.dtype == FP32 and torch.equal(outputs.loss, loss(outputs))
    outputs.loss.backward()
    for path, param in model.named_parameters():
        assert param.grad is None or param.grad.dtype == param.dtype, path
        assert param.grad is not None or re.search("relative_attention_bias|embed|pooler", path), path


def test_where_no_layer_is_known_to_predict_the_loss_alone_is_fp32():
    torch.manual_seed(0)
    sides = [f"{side}_{part}" for side in ("encoder", "decoder") for part in ("layers", "attention_heads", "ffn_dim")]
    size = {"src_vocab_size": 64, "tgt_vocab_size": 64, "d_model": 16, **dict.fromkeys(sides, 2)}
    config = transformers.FSMTConfig(langs=["en", "de"], **size)
    model = upcast(transformers.FSMTForConditionalGeneration(config)).eval()
    outputs = model(input_ids=TOKENS, labels=TOKENS)
    assert outputs.logits.dtype == BF16
    assert outputs.loss.item() == pytest.approx(by_class(outputs.logits.double(), TOKENS).item(), rel=1e-6)


def test_only_what_makes_the_predictions_returns_fp32() -> None:
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(vocab_size=64, dim=32, n_layers=1, n_heads=2, hidden_dim=32, num_labels=3)
    model = upcast(transformers.DistilBertForSequenceClassification(config))
    seen = output_dtypes(model, {"input_ids": TOKENS, "labels": CLASSES})
    assert {name for name, dtypes in seen.items() if FP32 in dtypes} == {"", "classifier"}
    assert "pre_classifier" in seen


@pytest.mark.parametrize("auxiliary", [True, False])
def test_auxiliary_predictions_belong_to_them(auxiliary: bool) -> None:
    size: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.DPTConfig(
        **size, intermediate_size=32, image_size=32, patch_size=8, fusion_hidden_size=8, num_labels=3,
        neck_hidden_sizes=[8, 8, 8, 8], backbone_out_indices=[0, 1, 2, 3], use_auxiliary_head=auxiliary,
        semantic_classifier_dropout=0.0,
    )  # fmt: skip
    model = upcast(transformers.DPTForSemanticSegmentation(config)).eval()
    seen = output_dtypes(model, {"pixel_values": torch.randn(2, 3, 32, 32)})
    heads = {name for name, dtypes in seen.items() if name and "." not in name and dtypes == {FP32}}
    assert heads == {"head", *["auxiliary_head"] * auxiliary}


class Swapped(transformers.BertPreTrainedModel):
    """Its children are written in another order than they are called in."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = transformers.BertModel(config)
        self.classifier = nn.Linear(32, 3)
        self.transform = nn.Linear(32, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.transform(self.bert(input_ids).pooler_output)
        return nn.functional.cross_entropy(self.classifier(hidden), labels)


def test_another_order_of_calls_costs_no_crash(monkeypatch):
    model = Swapped(transformers.BertConfig(**SIZES))
    monkeypatch.setattr(Swapped, "__module__", "transformers.models.swapped")
    upcast(model)
    loss = model(TOKENS, CLASSES)
    loss.backward()
    assert len(model.transform._forward_hooks) == 1
    assert loss.isfinite() and model.transform.weight.grad.any()


class Prototypes(transformers.BertPreTrainedModel):
    """A class of a user's, which goes on with what its last child returns and a parameter of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = transformers.BertModel(config)
        self.project = nn.Linear(32, 8)
        self.prototypes = nn.Parameter(torch.randn(8, 3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.project(self.bert(input_ids)[1]) @ self.prototypes, labels)


def test_classes_of_others_are_left_alone():
    model = upcast(Prototypes(transformers.BertConfig(**SIZES)))
    assert not computes_loss_itself(model)
    loss = model(TOKENS, CLASSES)
    loss.backward()
    assert loss.isfinite() and model.prototypes.grad.dtype == BF16


def test_models_with_a_loss_function_are_left_alone():
    model, batch = tiny_models.llama()
    assert not computes_loss_itself(model)
    assert upcast(model)(**batch).logits.dtype == BF16
    base = transformers.BertModel(transformers.BertConfig(**SIZES))
    assert not computes_loss_itself(base)


def test_a_head_that_is_kept_returns_fp32_by_itself():
    model = built("BertForSequenceClassification", num_labels=3)
    cast_model(model, keep_fp32="classifier")
    hooks = len(model.classifier._forward_hooks)
    upcast_predictions(model, BF16)
    assert len(model.classifier._forward_hooks) == hooks
    assert model(input_ids=TOKENS, labels=CLASSES).loss.dtype == FP32


def test_once_copied_and_taken_back():
    model = upcast(built("BertForSequenceClassification", num_labels=3))
    hooks = len(model.classifier._forward_hooks)
    upcast_predictions(model, BF16)
    assert len(model.classifier._forward_hooks) == hooks == 1
    assert not cast_model(model).changed
    expected = model(input_ids=TOKENS, labels=CLASSES).loss
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(input_ids=TOKENS, labels=CLASSES).loss, expected)
    uncast_model(model)
    assert not model.classifier._forward_hooks
