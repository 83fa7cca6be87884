"""Models of transformers against FP32: what `cast_model` leaves in which dtype, and whether a step of training agrees.

The page of architectures says which classes train. The short suite takes types that train in a second or less and that
reach between them every branch of `hf_lowprec.casting` that any type reaches, and every kind of entry in
`listed_classes`; `make test-all` takes all.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from hf_lowprec.casting import cast, cast_model, fp32_rules
from hf_lowprec.casting.listed_classes import (
    CLASSES_CALLED_WITH_FP32,
    CLASSES_COMPUTING_IN_FP32,
    CLASSES_RETURNING_FP32,
)
from tests.support.broken_layers import report
from tests.support.chosen_cases import EVERY_CASE
from tests.support.every_architecture import architecture_check
from tests.support.every_architecture.architecture_check import FAILS, NO_REFERENCE, TRAINS, check, check_model
from tests.support.every_architecture.batch_exceptions import LONG
from tests.support.every_architecture.model_classes import classes_by_type, main_class, try_class
from tests.support.models.inspection import BF16, output_dtypes
from tests.support.models.tiny_models import ARCHITECTURES
from tools import model_support

TEXT = model_support.PAGE.read_text(encoding="utf-8")
TYPES_THAT_TRAIN, OTHERS = model_support.read(TEXT)
SAME_VERSION = model_support.version_of(TEXT) == transformers.__version__
TYPES = classes_by_type()
SAID = {
    (model_type, name): OTHERS.get((model_type, name), TRAINS if model_type in TYPES_THAT_TRAIN else None)
    for model_type, names in TYPES.items()
    for name in names
}
REPRESENTATIVES = (
    *("autoformer", "beit", "bit", "bros", "clvp", "convbert", "convnext", "deepseek_v4", "diffllama", "distilbert"),
    *("edgetam", "fnet", "fun_asr_nano_encoder", "minimax_m3_vl", "mra", "resnet", "sam", "swin", "timesfm", "tipsv2"),
    *("wav2vec2", "whisper", "xlnet", "xlstm"),
)
SOURCES = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
ADVICE = f"if that is right, write the page anew: {model_support.COMMAND}"
VARIANTS = [
    pytest.param(name, {"tied": tied, "attention": attention}, id=f"{name}-{tied}-{attention}")
    for name, architecture in ARCHITECTURES.items()
    for tied, attention in architecture.variants()
]


@pytest.fixture(autouse=True, scope="module")
def silence() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize("model_type", [name for name in TYPES if EVERY_CASE or name in REPRESENTATIVES])
def test_trains_as_the_page_says(model_type: str) -> None:
    name = main_class(TYPES[model_type])
    said = SAID[model_type, name]
    if model_type in LONG or (said is None and not SAME_VERSION):
        return  # walked for the page only; or not there in the version the page was written with
    outcome = try_class(name, model_type)
    report(name, outcome.broken)
    found = (
        f"{name} ({model_type}): {outcome.kind}, {outcome.note or 'no note'}; {model_support.PAGE.name} says: {said}"
    )
    if not SAME_VERSION or (said == NO_REFERENCE and outcome.kind == TRAINS):
        # Configs differ between versions, optional packages between machines: only the cast is ours.
        assert outcome.kind != FAILS or said == FAILS, found
    else:
        assert outcome.kind == said, f"{found}; {ADVICE}"


@pytest.mark.skipif(not SAME_VERSION, reason="the page was written with another version of transformers")
def test_the_page_has_every_class() -> None:
    unknown = [where for where, kind in SAID.items() if kind is None]
    gone = [*(OTHERS.keys() - SAID.keys()), *(TYPES_THAT_TRAIN - TYPES.keys())]
    assert (unknown, gone) == ([], []), ADVICE
    kinds = [*SAID.values()]
    assert f"**{kinds.count(TRAINS)} of {len(kinds) - kinds.count(NO_REFERENCE)} compared model classes" in TEXT, ADVICE


def test_enough_train() -> None:
    kinds = [kind for kind in SAID.values() if kind != NO_REFERENCE]
    assert kinds.count(TRAINS) >= 0.95 * len(kinds) and len(kinds) > 500


@pytest.mark.skipif(not SAME_VERSION, reason="another version of transformers has other classes")
def test_every_listed_name_is_a_class_of_transformers() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in SOURCES)
    for listed in (*CLASSES_COMPUTING_IN_FP32, *CLASSES_CALLED_WITH_FP32, *CLASSES_RETURNING_FP32):
        name, _, child = listed.partition(".")
        _, found, rest = code.partition(f"class {name}(")
        assert found and f"self.{child}" in rest.partition("\nclass ")[0], listed


@pytest.mark.combinations(1)
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_common_models_train_and_every_module_returns_16_bits(name: str, options: dict[str, Any]) -> None:
    model, batch = ARCHITECTURES[name].build(seed=3, **options)
    outcome = check_model(model, [("", batch)])
    report(name, outcome.broken)
    assert (outcome.kind, outcome.note) == (TRAINS, "")
    cast_model(model)
    layers = {path for path, module in model.named_modules() if path and any(True for _ in module.parameters())}
    assert not {path: d for path, d in output_dtypes(model, batch).items() if path in layers and d != {BF16}}


POSITIONS, WEIGHT = "hubert.encoder.pos_conv_embed.conv", (96, 12, 16)


def break_convolution(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Let torch's convolution with these weights be wrong in BF16: its output, or its weight's gradient."""
    right = F.conv1d

    def wrong(values: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
        planted = values.dtype == BF16 and weight.shape == WEIGHT
        if planted and where == "gradient":
            weight = weight.clone()
            weight.register_hook(lambda gradient: gradient * float("nan"))
        output = right(values, weight, *args)
        return output + 30 * output.detach().roll(1) if planted and where == "output" else output

    monkeypatch.setattr(F, "conv1d", wrong)


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("where", [pytest.param("output", marks=pytest.mark.every_case), "gradient"])
def test_a_layer_that_torch_computes_wrongly_is_kept_in_fp32(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    break_convolution(monkeypatch, where)
    outcome = check(transformers.HubertForCTC, "hubert")
    assert (outcome.kind, outcome.broken) == (TRAINS, (POSITIONS,)), outcome
    # It is `keep_fp32` that lets it pass, and nothing else.
    monkeypatch.setattr(architecture_check, "broken_layers", lambda model, batch: ())
    assert check(transformers.HubertForCTC, "hubert").kind == FAILS


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.combinations(1)
@pytest.mark.parametrize("norms_are_cast", [False, True], ids=["norms do not round", "norms are cast"])
@pytest.mark.parametrize("broken", [False, True])
def test_a_mistake_of_ours_is_not_left_to_the_layer(
    monkeypatch: pytest.MonkeyPatch, norms_are_cast: bool, broken: bool
) -> None:
    if broken:
        break_convolution(monkeypatch, "output")
    if norms_are_cast:
        monkeypatch.setattr(fp32_rules, "is_norm", lambda module: False)
    else:
        monkeypatch.setitem(cast.INSTALL, "downcast outputs", lambda *args: False)
    outcome = check(transformers.HubertForCTC, "hubert")
    assert (outcome.kind, outcome.broken) == (FAILS, (POSITIONS,) * broken), outcome
