"""Results are bit for bit those of the recording, on every backend; tests/golden/README.md tells what to do if not."""

import itertools
from typing import Any

import pytest

import hf_lowprec
from tests.golden import casting, checkpoints, recording, steps
from tests.support.chosen_cases import EVERY_CASE
from tests.support.triton_available import quiet_interpreter, require_triton

RECORDED = recording.read()
pytestmark = quiet_interpreter


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
    """Weights, states, norms and FP32 estimates, after up to 50 steps."""
    assert_steps("native", f"{algorithm} {mode}")


# That backends agree is for tests/optim/test_backends.py, where only Prodigy is missing.
@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("backend", "algorithm", "mode"),
    [
        pytest.param(
            *(backend, algorithm, mode),
            marks=() if algorithm == "Prodigy" and mode in ("kahan", "stochastic") else pytest.mark.every_case,
        )
        for backend, algorithm, mode in itertools.product(("eager", "triton"), steps.ALGORITHMS, steps.MODES)
    ],
)
def test_steps_of_other_backends(backend, algorithm, mode):
    if backend == "triton":
        require_triton()
    assert_steps(backend, f"{algorithm} {mode}")


def assert_steps(backend: str, run: str) -> None:
    last, names = recording.QUICK[backend]
    found = steps.record(*run.split(), backend, last, names)
    wanted = {
        name: {step: digests for step, digests in case.items() if int(step.split()[1]) <= last}
        for name, case in RECORDED["steps"][run].items()
        if not names or name in names
    }
    wanted = {name: case for name, case in wanted.items() if case}
    different = list(recording.differences(wanted, found, f"{backend} / {run}"))
    assert not different, "\n".join([f"{len(different)} results differ from tests/golden/recording.json", *different])


@pytest.mark.parametrize("run", recording.RUNS)
def test_state_dicts_that_were_saved_before(run):
    """They load, and the next step is the recorded one."""
    for backend in ("native", "eager"):
        assert_recorded("checkpoints", run, checkpoints.record(*run.split(), backend))


@pytest.mark.parametrize("run", recording.RUNS)
def test_layout_of_state_dicts(run):
    assert_recorded("state dicts", run, steps.record_layout(*run.split()))


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
