"""The comparison with FP32 on a machine whose torch is wrong: it passes by `keep_fp32` alone, and our mistakes fail."""

import pytest
import torch
from torch.nn import functional as F
from transformers import HubertForCTC

from hf_lowprec.casting import apply_plan as apply
from hf_lowprec.casting import fp32_rules
from tests.support import broken_layers
from tests.support.every_architecture import architecture_check
from tests.support.every_architecture.architecture_check import FAILS, TRAINS
from tests.support.models.training_check import check_training
from tests.support.models.vision_and_speech_models import MODELS

pytestmark = pytest.mark.usefixtures("own_kernels")
POSITIONS, WEIGHT = "hubert.encoder.pos_conv_embed.conv", (96, 12, 16)


def break_convolution(monkeypatch, *shapes: tuple[int, ...], where: str = "output") -> None:
    """Let torch's convolution with weights of these shapes be wrong in BF16: its output, or its weight's gradient."""
    right = F.conv1d

    def wrong(values, weight, *args):
        planted = values.dtype == torch.bfloat16 and weight.shape in shapes
        if planted and where == "gradient":
            weight = weight.clone()
            weight.register_hook(lambda gradient: gradient * float("nan"))
        output = right(values, weight, *args)
        return output + 30 * output.detach().roll(1) if planted and where == "output" else output

    monkeypatch.setattr(F, "conv1d", wrong)


def norms_are_cast(monkeypatch) -> None:
    monkeypatch.setattr(fp32_rules, "is_norm", lambda module: False)


def norms_do_not_round(monkeypatch) -> None:
    monkeypatch.setitem(apply.INSTALL, "downcast outputs", lambda *args: False)


@pytest.mark.parametrize("where", [pytest.param("output", marks=pytest.mark.every_case), "gradient"])
def test_a_broken_layer_is_kept_in_fp32(monkeypatch, where):
    break_convolution(monkeypatch, WEIGHT, where=where)
    outcome = architecture_check.check(HubertForCTC, "hubert")
    assert (outcome.kind, outcome.broken) == (TRAINS, (POSITIONS,)), outcome
    # It is `keep_fp32` that lets it pass, and nothing else.
    monkeypatch.setattr(architecture_check, "broken_layers", lambda model, batch: ())
    assert architecture_check.check(HubertForCTC, "hubert").kind == FAILS


@pytest.mark.combinations(1)
@pytest.mark.parametrize("mistake", [norms_are_cast, norms_do_not_round])
@pytest.mark.parametrize("broken", [False, True])
def test_a_mistake_of_ours_is_not_left_to_the_layer(monkeypatch, mistake, broken):
    if broken:
        break_convolution(monkeypatch, WEIGHT)
    mistake(monkeypatch)
    outcome = architecture_check.check(HubertForCTC, "hubert")
    assert (outcome.kind, outcome.broken) == (FAILS, (POSITIONS,) * broken), outcome


def test_comparisons_of_the_shelf_go_around_it_as_well(monkeypatch):
    break_convolution(monkeypatch, (16, 8, 3), (16, 16, 3))
    with pytest.warns(UserWarning, match=r"whisper: model\.encoder\.conv1 is wrong on this machine"):
        broken_layers.check_around_broken_layers("whisper", MODELS["whisper"], check_training)
