"""Contrastive losses of transformers: what they compare is FP32, and so are logits and loss."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_lowprec.casting import cast_model
from hf_lowprec.casting.losses import upcast_predictions
from tests.support.chosen_cases import nightly_except
from tests.support.every_architecture.architecture_check import tiny_model
from tests.support.every_architecture.tiny_batches import offers
from tests.support.models.inspection import BF16, FP32

Batch = dict[str, Any]
UNIT = 2.0**-24  # FP32 has 24 significant bits: rounding to nearest errs by at most this much of the value

CONTRASTIVE = {
    **{"AlignModel": "align", "AltCLIPModel": "altclip", "BlipModel": "blip", "ChineseCLIPModel": "chinese_clip"},
    **{"BridgeTowerForContrastiveLearning": "bridgetower", "ClapModel": "clap", "CLIPModel": "clip"},
    **{"CLIPSegModel": "clipseg", "ClvpModelForConditionalGeneration": "clvp", "FlavaForPreTraining": "flava"},
    **{"GroupViTModel": "groupvit", "MetaClip2Model": "metaclip_2", "Owlv2Model": "owlv2", "OwlViTModel": "owlvit"},
    **{"PeAudioModel": "pe_audio", "PeAudioFrameLevelModel": "pe_audio", "SiglipModel": "siglip"},
    **{"Siglip2Model": "siglip2", "Tipsv2Model": "tipsv2", "VideoPrismClipModel": "videoprism"},
    **{"VisionTextDualEncoderModel": "vision-text-dual-encoder", "XCLIPModel": "xclip"},
}
"""Classes with a contrastive loss, and their model types."""

SHORT = {"AlignModel", "BlipModel", "CLIPModel", "ClvpModelForConditionalGeneration", "FlavaForPreTraining"}
SHORT |= {"SiglipModel", "Owlv2Model", "XCLIPModel"}

UNBUILT = {"PeVideoModel", "PeAudioVideoModel"}
"""They have one too, but their tiny configs need timm; their losses are those of `PeAudioModel`."""

OTHERS = {
    "BarkFineModel": "samples at a temperature",
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM"), "scales a `loss_function`"),
    **dict.fromkeys(("CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"), "scales a `loss_function`"),
    "EfficientLoFTRForKeypointMatching": "does not train",
    "OneFormerForUniversalSegmentation": "a loss module, which is FP32",
    "SeamlessM4Tv2Model": "generates at a temperature",
    **dict.fromkeys(("SeamlessM4Tv2ForTextToSpeech", "SeamlessM4Tv2ForSpeechToSpeech"), "generate at a temperature"),
    "TapasForQuestionAnswering": "divides the scores of a table's cells by one",
    **dict.fromkeys(("UniSpeechForPreTraining", "UniSpeechSatForPreTraining"), "have no loss as yet"),
    **dict.fromkeys(("Wav2Vec2ForPreTraining", "Wav2Vec2ConformerForPreTraining"), "convert to FP32 themselves"),
}
"""Classes that look like it, and why they are none of these."""


@pytest.mark.every_case
def test_these_are_all_classes_that_have_one() -> None:
    found = set[str]()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for code in re.split(r"^(?=class |def |@)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            code = re.sub(r'""".*?"""', "", code, flags=re.DOTALL)
            scales = re.search(r"contrastive_loss\(|logit_scale|temperature|logsigmoid", code)
            if scales and re.search(r"\b(\w+_)?loss = ", code):
                found |= set(re.findall(r"^class (\w+)", code))
    assert found == CONTRASTIVE.keys() | UNBUILT | OTHERS.keys()


def built(name: str) -> tuple[Any, Batch]:
    """A tiny model, and a batch of pairs with its loss."""
    fields: dict[str, Any] = {}
    if name.startswith("BridgeTower"):
        fields = {"contrastive_hidden_size": 16, "logit_scale_init_value": 2.6592}  # of its checkpoints alone
    model = tiny_model(getattr(transformers, name), CONTRASTIVE[name], **fields)
    if name.startswith("Clvp"):
        model.config.decoder_config.decoder_fixing_codes = [83, 45, 45, 48]  # after a stop token; 248 is none here
    if name.startswith("PeAudio"):
        nn.init.ones_(model.text_audio_logit_scale)  # zero before it has trained
    kind = {"XCLIPModel": 5, "ClapModel": 4}.get(name, 0)  # dimensions of videos; of sounds
    fits = (
        batch for _, batch in offers(model) if not kind or kind in {x.dim() for x in batch.values() if x is not True}
    )
    batch = next(fits) | {"return_loss": True}
    batch.pop("labels", None)
    if name == "FlavaForPreTraining":
        patches = torch.arange(16).expand(2, -1)
        batch |= {"mim_labels": patches % 5, "bool_masked_pos": patches % 2 == 0, "itm_labels": torch.ones(2).long()}
        batch |= {"mlm_labels": batch["input_ids"].clone(), "input_ids_masked": batch["input_ids"]}
    if name == "PeAudioFrameLevelModel":  # its loss needs as many sounds as a sound has frames
        batch = {key: value if value is True else value[[0, 1, 0]] for key, value in batch.items()}
    return model, batch


def upcast(name: str) -> tuple[Any, Batch]:
    model, batch = built(name)
    cast_model(model)
    upcast_predictions(model, BF16)
    return model, batch


@pytest.mark.parametrize("name", nightly_except(SHORT, CONTRASTIVE))
def test_the_loss_and_what_it_compares_are_float32(name: str) -> None:
    model, batch = upcast(name)
    outputs = model(**copy.deepcopy(batch))
    found = {key: value for key, value in outputs.items() if isinstance(value, Tensor)}
    compared = [key for key in found if "logits" in key or (key.endswith("_embeds") and name != "FlavaForPreTraining")]
    assert {found[key].dtype for key in (*compared, "loss")} == {FP32} and len(compared) > 1
    losses = {"loss": outputs.loss, **{k: v for k, v in (outputs.get("loss_info") or {}).items() if v is not None}}
    assert {loss.dtype for loss in losses.values()} == {FP32}
    # Products of FP32 numbers are no numbers of BF16.
    logits = next(
        found[key] for key in compared if key.startswith("contrastive_logits" if "Flava" in name else "logits")
    )
    assert not torch.equal(logits, logits.to(BF16).float())
    outputs.loss.backward()
    assert all(p.grad is None or (p.grad.dtype == p.dtype and p.grad.isfinite().all()) for p in model.parameters())


def paired(logits: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of matching pairs, the diagonal, both ways."""
    pairs = torch.arange(len(logits))
    return sum(cross_entropy(x, pairs, label_smoothing=smoothing) for x in (logits, logits.T)) / 2  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "other"),
    [("AlignModel", "image"), ("ClvpModelForConditionalGeneration", "speech"), ("XCLIPModel", "video")],
)
def test_the_loss_is_that_of_the_formula_in_fp64(name: str, other: str) -> None:
    model, batch = upcast(name)
    with torch.no_grad():
        outputs = model(**batch)
        scale = 1 / model.temperature.double() if name == "AlignModel" else model.logit_scale.exp().double()
    ours, theirs = outputs.text_embeds.double(), outputs[f"{other}_embeds"].double()
    width = ours.shape[-1]
    # Divided by its norm in FP32: `width` squares are added, a root and a quotient are taken.
    assert all(((e.norm(dim=-1) - 1).abs() <= (width + 2) * UNIT).all() for e in (ours, theirs))
    texts = torch.einsum("vtd,vd->tv", ours, theirs) if name == "XCLIPModel" else ours @ theirs.T
    expected = paired(texts * scale, 0.1 if name == "AlignModel" else 0.0)
    # Logits, `scale` times products of unit vectors, are off by (width + 2) roundings of `scale` at most; a loss
    # by twice what its logits are, and by a few roundings of its own sums, which are below 4 where a loss is below 2.
    assert outputs.loss.dtype == FP32 and 0 < expected < 2
    assert abs(outputs.loss.item() - expected.item()) <= 2 * (width + 2) * UNIT * scale.item() + 8 * UNIT * 4
