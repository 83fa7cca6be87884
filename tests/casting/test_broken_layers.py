"""The comparison with FP32 on a machine whose torch is wrong: it passes by the way out alone, and our mistakes fail."""

import pytest
from transformers import HubertForCTC

from hf_lowprec.casting import apply_plan as apply
from hf_lowprec.casting.fp32_rules import norms
from tests.support.broken_kernels import broken_layers
from tests.support.broken_kernels.planted import break_function, fill, off_by
from tests.support.every_architecture import architecture_check
from tests.support.every_architecture.architecture_check import FAILS, TRAINS
from tests.support.models.training_check import check_training
from tests.support.models.vision_and_speech_models import MODELS

pytestmark = pytest.mark.usefixtures("own_kernels")
POSITIONS = "hubert.encoder.pos_conv_embed.conv"


@pytest.fixture
def broken_positions(monkeypatch) -> None:
    """The grouped convolution is wrong, for the one shape that the tiny model calls it with."""

    def only(values) -> bool:
        return values[0].shape == (2, 96, 4) and values[1].shape == (96, 12, 16)

    break_function(monkeypatch, "conv1d", off_by(30.0), only=only)


def test_a_broken_layer_is_kept_in_fp32_and_named(broken_positions, monkeypatch):
    outcome = architecture_check.check(HubertForCTC, "hubert")
    assert (outcome.kind, list(outcome.broken)) == (TRAINS, [POSITIONS]), outcome
    with pytest.warns(UserWarning, match=rf"HubertForCTC: {POSITIONS} is wrong on this machine .*output unrelated"):
        broken_layers.report("HubertForCTC", outcome.broken)
    # It is the way out that lets it pass, and nothing else.
    monkeypatch.setattr(architecture_check, "broken_layers", lambda model, batch: {})
    assert architecture_check.check(HubertForCTC, "hubert").kind == FAILS


def test_a_gradient_that_is_not_finite_is_seen_too(monkeypatch):
    nan = fill(float("nan"), (0, 0, 0))
    break_function(monkeypatch, "conv1d", nan, "weight", only=lambda values: values[1].shape == (96, 12, 16))
    outcome = architecture_check.check(HubertForCTC, "hubert")
    assert (outcome.kind, list(outcome.broken)) == (TRAINS, [POSITIONS]), outcome


def norms_are_cast(monkeypatch) -> None:
    monkeypatch.setattr(norms, "is_norm", lambda module: False)


def norms_do_not_round(monkeypatch) -> None:
    monkeypatch.setitem(apply.INSTALL, "downcast outputs", lambda *args: False)


@pytest.mark.parametrize("mistake", [norms_are_cast, norms_do_not_round])
@pytest.mark.parametrize("broken", [False, True])
def test_a_mistake_of_ours_is_not_left_to_the_layer(request, monkeypatch, mistake, broken):
    if broken:
        request.getfixturevalue("broken_positions")
    mistake(monkeypatch)
    outcome = architecture_check.check(HubertForCTC, "hubert")
    assert (outcome.kind, list(outcome.broken)) == (FAILS, [POSITIONS] * broken), outcome


def test_comparisons_of_the_shelf_go_around_it_as_well(monkeypatch):
    break_function(monkeypatch, "conv1d", off_by(30.0))
    build = MODELS["whisper"]
    with pytest.raises(AssertionError):
        check_training(*build(), ())
    with pytest.warns(UserWarning, match=r"whisper: model\.encoder\.conv1 is wrong on this machine"):
        broken_layers.check_around_broken_layers("whisper", build, check_training)
    monkeypatch.undo()
    norms_do_not_round(monkeypatch)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        broken_layers.check_around_broken_layers("whisper", build, check_training)
