"""Other packages' optimizers in the evidence: bytes as counted by hand, equal runs, and packages that are missing."""

import dataclasses

import pytest

pytest.importorskip("scipy")
pytest.importorskip("datasets")

from benchmarks.evidence import harness
from benchmarks.evidence.experiments import peers
from benchmarks.evidence.training.replicas import Replicas, Shape
from benchmarks.peers import memory, optimizers

SHAPE = Shape(width=32, layers=1, length=32)
SETTINGS = peers.Settings(seeds=2, steps=9, shape=SHAPE, replica_steps=2, repetitions=1)
SPLIT, FLASH = "hf-lowprec-adamw-split-bf16-states", "flashoptim-adamw-24-bits"
SR, OPTIMI = "hf-lowprec-adamw-stochastic-8-bit-states", "optimi-adamw-kahan-bf16-states"


def measured(case, folder):
    return peers.run(case, SETTINGS, harness.Workspace(folder, lambda line: None, None))


@pytest.mark.parametrize(
    ("case", "of_weights", "of_norms", "of_steps"),
    [(SPLIT, 2 + 2 + 2 + 2 + 2, 4 * 4, 8), (FLASH, 2 + 2 + 1 + 2 * (1 + 2 / 32), 4 + 4 + 2 * (1 + 2 / 32), 0)],
)
def test_bytes_are_those_counted_by_hand(case, of_weights, of_norms, of_steps, tmp_path):
    """Weight, gradient, correction and two moments; norms are in FP32. Each of nine tensors may count its steps."""
    norms = 3 * SHAPE.width
    both = SETTINGS.seeds * (of_weights * (SHAPE.parameters() - norms) + of_norms * norms) + 9 * of_steps
    assert measured(case, tmp_path)["bytes"] == pytest.approx(both / SETTINGS.seeds / SHAPE.parameters(), rel=1e-12)


@pytest.mark.parametrize("case", [peers.FP32_CASE, SR, FLASH])
def test_runs_are_equal_again_and_after_an_interruption(case, tmp_path, monkeypatch):
    whole, save = measured(case, tmp_path / "whole"), harness.Workspace.save

    def interrupted(work, case, checkpoint):
        save(work, case, checkpoint)
        if checkpoint["step"] == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(harness, "CHECKPOINT_EVERY", 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(harness.Workspace, "save", interrupted)
        measured(case, tmp_path / "parts")
    assert measured(case, tmp_path / "parts") == whole
    names = [tmp_path / folder / f"{case}.npy" for folder in ("whole", "parts")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_a_missing_package_is_named_and_its_record_stays(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optimi")
    monkeypatch.setattr(memory, "SHAPES", ((64, 64),))
    installed = optimizers.is_installed
    monkeypatch.setattr(optimizers, "is_installed", lambda package: package == "torch-optimi" and installed(package))
    experiment = dataclasses.replace(peers.EXPERIMENT, settings={"hour": SETTINGS})
    cases = [peers.FP32_CASE, OPTIMI, peers.STEP_TIME]
    first = harness.run(experiment, "hour", cases, tmp_path)
    assert list(first["cases"]) == cases
    assert len(first["compared"]["distance"][OPTIMI]) == SETTINGS.seeds
    assert {*first["cases"]["step-time"]["times"]} > {SPLIT, OPTIMI}
    assert "torchao AdamW8bit, weights nearest: left out, torchao is not installed" in capsys.readouterr().out
    monkeypatch.setattr(optimizers, "is_installed", lambda package: False)
    assert harness.run(experiment, "hour", cases[:1], tmp_path)["cases"].keys() == first["cases"].keys()
    section = experiment.section(first)
    assert "Not measured: torchao AdamW8bit, weights nearest; torchao is not installed." in section.text
    assert "Not measured: torch AdamW, BF16." in section.text
    assert "| optimi AdamW, Kahan, BF16 states |" in section.tables[0]


@pytest.mark.parametrize("settings", peers.EXPERIMENT.settings.values())
def test_no_block_of_8_bit_states_belongs_to_two_seeds(settings):
    for name, param in Replicas([0], settings.shape).named_parameters():
        assert param.numel() % (32 if "norm" in name else 256) == 0
