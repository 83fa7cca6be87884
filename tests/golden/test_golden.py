"""Results are bit for bit those of the recording; tests/golden/README.md tells what to do if not."""

import itertools
from typing import Any

import pytest

import hf_lowprec
from tests.golden import casting, recording, steps
from tests.support.chosen_cases import EVERY_CASE

RECORDED = recording.read()


def assert_recorded(section: str, entry: str, found: Any) -> None:
    different = list(recording.differences(RECORDED[section][entry], found, f"{section} / {entry}"))
    assert not different, "\n".join([f"{len(different)} results differ from tests/golden/recording.json", *different])


def test_the_recording_is_of_what_there_is():
    assert tuple(RECORDED["optimizer names"]) == hf_lowprec.OPTIMIZER_NAMES
    for section in ("steps", "checkpoints", "state dicts", "one process", "two ranks"):
        assert list(RECORDED[section]) == recording.RUNS, section
    assert list(RECORDED["cast_model"]) == list(casting.MODELS)


every_algorithm_and_mode = pytest.mark.parametrize(
    ("algorithm", "mode"), [*itertools.product(steps.ALGORITHMS, steps.MODES)]
)


@pytest.mark.combinations(1)
@every_algorithm_and_mode
def test_steps(algorithm, mode):
    """Weights, states, norms and FP32 estimates, after up to 50 steps; `test_backends.py` compares the backends."""
    assert_recorded("steps", f"{algorithm} {mode}", steps.record(algorithm, mode, "native"))


@every_algorithm_and_mode
def test_state_dicts(algorithm, mode):
    """Those that were saved before load, and the next step is the recorded one; new ones have the recorded layout."""
    run = f"{algorithm} {mode}"
    assert_recorded("checkpoints", run, steps.record_checkpoint(algorithm, mode, "native"))
    assert_recorded("state dicts", run, steps.record_layout(algorithm, mode))


@pytest.mark.parametrize("name", casting.MODELS)
def test_cast_model(name):
    assert_recorded("cast_model", name, casting.record(name))


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_and_trainer():
    """One process, ranks under DDP and FSDP2, and every `optim=` string in Trainer; an old checkpoint resumes."""
    runs = recording.RUNS if EVERY_CASE else recording.FEW_RUNS
    different = list(recording.differences_apart(RECORDED, recording.in_other_processes(runs), runs))
    assert not different, "\n".join([f"{len(different)} results differ from tests/golden/recording.json", *different])


def test_a_difference_is_named():
    recorded = {"AdamW kahan": {"mixed dtypes": {"step 3": {"bf16 weight": "01", "bf16 exp_avg": "02"}}}}
    found = {"AdamW kahan": {"mixed dtypes": {"step 3": {"bf16 weight": "01", "bf16 exp_avg": "03"}}, "large": {}}}
    assert list(recording.differences(recorded, found)) == [
        "AdamW kahan / mixed dtypes / step 3 / bf16 exp_avg: recorded '02', now '03'",
        "AdamW kahan / large: new, not in the recording",
    ]
