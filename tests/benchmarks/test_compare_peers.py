"""The comparison with other packages runs without them, and its copy of FlashOptim's formats is right."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

pytest.importorskip("datasets")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

import compare_peers  # noqa: E402
import state_rounding  # noqa: E402
import states_in_8_bits  # noqa: E402
from peers import displacement, memory, optimizers, sharding, short_training  # noqa: E402
from peers.candidates import BASELINE, CANDIDATES, Candidate  # noqa: E402
from peers.flash_adamw import (  # noqa: E402
    FlashAdamW,
    correction,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
)

from hf_lowprec.tools.demo import stages  # noqa: E402

BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}
SPLIT = "hf_lowprec AdamW, split, 8-bit states"
OURS = "hf_lowprec AdamW, stochastic, BF16 states"
OPTIMI = "optimi AdamW, Kahan, BF16 states"
FLASH = "FlashOptim AdamW, 24 bits"


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setattr(optimizers, "is_installed", lambda package: False)


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


@pytest.fixture
def second_of_two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "width", "verdict"),
    [(BASELINE, 100, "equal"), (SPLIT, 512, "equal"), (FLASH, 512, "equal"), (FLASH, 100, "different")],
)
def test_groups_on_the_local_shard_change_bits(name, width, verdict, second_of_two_ranks):
    """A rank's rows of 100 begin within a group of 32 of the whole tensor."""
    assert sharding.compare(BY_NAME[name], (37, width), second_of_two_ranks) == verdict


def test_different_bits_count_before_errors():
    assert sharding.of_all_ranks(["equal", "equal"]) == "equal"
    assert sharding.of_all_ranks(["ValueError: uneven", "different"]) == "different"
    assert sharding.of_all_ranks(["equal", "ValueError: uneven"]) == "ValueError: uneven"
    assert sharding.summary(["equal"] * 3) == "yes"
    verdicts = ["different", "equal", "ValueError: uneven", "different"]
    assert sharding.summary(verdicts) == "2 of 4 differ; 1 of 4 raise ValueError"


@pytest.mark.every_case
def test_everything_is_measured_without_other_packages(tmp_path, monkeypatch, capsys, no_peers):
    monkeypatch.setattr(compare_peers, "CANDIDATES", [BY_NAME[name] for name in (BASELINE, OURS, OPTIMI, FLASH)])
    monkeypatch.setattr(compare_peers, "CASES", displacement.CASES[:3])
    monkeypatch.setattr(states_in_8_bits, "STEPS", 3)
    monkeypatch.setattr(state_rounding, "STEPS", 3)
    monkeypatch.setattr(memory, "SHAPES", ((64, 64),))
    monkeypatch.setattr(stages, "VALIDATION_BLOCKS", 4)
    monkeypatch.setattr(short_training, "VALIDATION_BLOCKS", 4)
    # torch's stance towards compilation would stay for the tests after this one.
    monkeypatch.setattr(optimizers, "run_uncompiled", lambda: None)
    output = tmp_path / "result.json"
    more = ["--elements", "256", "--seeds", "2", "--steps", "2", "--threads", str(torch.get_num_threads())]
    for parts in ("bytes,mean", "scale,training"):
        compare_peers.main(["--parts", parts, "--output", str(output), *more])
    measured, printed = json.loads(output.read_text())["parts"], capsys.readouterr().out
    assert f"{OPTIMI}: left out, torch-optimi is not installed" in printed
    for part, seeds in (("bytes", 1), ("mean", 2), ("scale", 2), ("training", 2)):
        assert {name: len(values) for name, values in measured[part].items()} == dict.fromkeys(
            (BASELINE, OURS, FLASH), seeds
        )
    assert measured["bytes"][FLASH] == [2 + 2 + 1 + 2 * (1 + 2 / 32)]
    assert measured["mean"][BASELINE] == [[0, 0]] * 2
    assert [len(values) for values in measured["scale"][OURS]] == [3, 3]
    assert all(map(math.isfinite, measured["training"][OURS]))
    row = next(line for line in printed.splitlines() if line.startswith(f"| {FLASH} | 7.12 |"))
    assert row.count("|") == 9  # eight cells


def test_displacements_are_compared_case_by_case(monkeypatch):
    """A candidate that descends the gradients, against torch's AdamW on each case alone."""
    monkeypatch.setattr(states_in_8_bits, "STEPS", 4)
    monkeypatch.setattr(states_in_8_bits, "DROP_AFTER", 2)
    descent = Candidate("descent", lambda params, **options: torch.optim.SGD(params, lr=1.0), torch.float32)
    cases = [displacement.CASES[k] for k in (0, 8, 16)]
    measured = displacement.by_scale([descent], cases, 256, seed=0)["descent"]
    grads = torch.stack(list(states_in_8_bits.gradients(cases, (4, 64), seed=0))).float()
    for case, found in enumerate(measured):
        weight = torch.nn.Parameter(torch.zeros(4, 64))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.999), weight_decay=0)
        for weight.grad in grads[:, case]:
            optimizer.step()
        moved, wanted = -grads[:, case].sum(0).flatten().double(), weight.detach().flatten().double()
        assert found.slope == pytest.approx(float(moved @ wanted / (wanted @ wanted)) - 1, rel=1e-5)
        assert found.error == pytest.approx(float((moved - wanted).norm() / wanted.norm()), rel=1e-5)


def test_an_output_of_other_versions_is_not_added_to(tmp_path, no_peers):
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"versions": {"torch": "1.0"}, "options": {}, "parts": {}}))
    with pytest.raises(SystemExit, match="other versions"):
        compare_peers.main(["--parts", "none", "--output", str(path), "--threads", str(torch.get_num_threads())])
