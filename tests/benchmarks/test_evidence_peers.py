"""Other packages' optimizers in the evidence: bytes, equal runs, missing packages, and FlashOptim's formats."""

import dataclasses

import pytest
import torch

pytest.importorskip("scipy")

from benchmarks.evidence import harness
from benchmarks.evidence.experiments import peers
from benchmarks.evidence.training import text
from benchmarks.evidence.training.replicas import Replicas, Shape
from benchmarks.peers import memory, optimizers
from benchmarks.peers.flash_adamw import (
    FlashAdamW,
    correction,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
)

SHAPE = Shape(width=32, layers=1, length=32)
SETTINGS = peers.Settings(seeds=2, steps=9, shape=SHAPE, replica_steps=2, repetitions=1)
SPLIT, FLASH = "hf-lowprec-adamw-split-bf16-states", "flashoptim-adamw-24-bits"
SR, OPTIMI = "hf-lowprec-adamw-stochastic-8-bit-states", "optimi-adamw-kahan-bf16-states"


@pytest.fixture(autouse=True)
def short_validation(monkeypatch):
    monkeypatch.setattr(text, "VALIDATION_SEQUENCES", 64)


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
    assert "| optimi AdamW, Kahan, BF16 states |" in section.table


@pytest.mark.parametrize("settings", peers.EXPERIMENT.settings.values())
def test_no_block_of_8_bit_states_belongs_to_two_seeds(settings):
    for name, param in Replicas([0], settings.shape).named_parameters():
        assert param.numel() % (32 if "norm" in name else 256) == 0


def test_first_moments_are_stored_to_half_a_step_of_their_code():
    """With y = 2x / (1 + |x|), dx/dy is (1 + |x|)² / 2, at most 2; half a step of y is 1/254. FP16 scales: 2⁻¹¹."""
    values = torch.randn(37, 100)
    codes, scale = encode_first(values)
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (torch.int8, values.shape, torch.float16, (116,))
    largest = torch.nn.functional.pad(values.flatten(), (0, 12)).view(-1, 32).abs().amax(1)
    x = values.flatten() / largest.repeat_interleave(32)[:3700]
    bound = ((1 + x.abs() + 1 / 127).square() / 2 / 254 + x.abs() / 2**11) * 1.001
    difference = (decode_first(codes, scale) - values).flatten() / largest.repeat_interleave(32)[:3700]
    assert (difference.abs() <= bound).all()


def test_second_moments_are_stored_as_roots():
    """Half a step of the root is 1/510 of the group's largest root."""
    values = torch.rand(4, 32).square()
    codes, scale = encode_second(values)
    assert (codes.dtype, codes.amax(1).tolist()) == (torch.uint8, [255] * 4)
    largest = values.amax(1, keepdim=True).sqrt()
    difference = decode_second(codes, scale).sqrt() - values.sqrt()
    assert (difference.abs() <= largest * (1 / 510 + 2**-11) * 1.001).all()


@pytest.mark.parametrize(("bits", "largest"), [(24, 127), (32, 32767)])
def test_masters_are_stored_to_half_a_step_of_their_correction(bits, largest):
    master = torch.randn(10_000).mul_(0.02)
    param = torch.nn.Parameter(master.bfloat16())
    optimizer = FlashAdamW([param], bits=bits)
    stored = correction(master, param.detach(), {24: torch.int8, 32: torch.int16}[bits])
    optimizer.state[param]["correction"] = stored
    ulp = torch.exp2(torch.floor(torch.log2(param.detach().double().abs())) - 7)
    # The correction is a share of half an ulp, and FP32 additions round to 2⁻¹⁷ of it.
    bound = ulp / 2 * (0.5 / largest + 2**-16)
    assert ((optimizer.master(param).double() - master.double()).abs() <= bound).all()
    assert 0.99 * largest < stored.abs().max() <= largest


def test_the_update_is_adamws():
    """In the first step, states are zeros, which no format changes; FP32 parameters have no other format."""
    weights = [torch.nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    options = {"lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    for weight, cls in zip(weights, (FlashAdamW, torch.optim.AdamW), strict=True):
        weight.grad = torch.linspace(-1, 1, 64)
        cls([weight], **options).step()
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-9)
