"""The GPU benchmark, as far as it goes without a GPU."""

import copy
import dataclasses
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_lowprec
from benchmarks.evidence.training.modes import MODES, MasterWeights
from hf_lowprec.optim.backends.triton import launch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_step.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def gpu(monkeypatch):
    """The modules of the benchmark, by name."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    names = ("benchmark", "budget", "candidates", "device", "report", "shapes", "training", "trial")
    return SimpleNamespace(**{name: importlib.import_module(f"gpu.{name}") for name in names})


@pytest.mark.every_case
@pytest.mark.slow
def test_the_rehearsal_runs_every_part(tmp_path, gpu):
    done = run("--rehearse", "--seconds", "240", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert result["failures"] == []
    (table,) = (path.read_text() for path in tmp_path.glob("*.md"))
    for part in ("One step of", "Training", "kahan", "stochastic", "nearest", "Left out"):
        assert part in table
    assert len(result["commit"].removesuffix("-dirty")) == 40
    assert len(result["left_out"]) == 2 and all("Liger" in what for what in result["left_out"])
    settings = {(each["batch"], each["compiled"], each["clipped"]): each["rows"] for each in result["training"]}
    assert settings.keys() == {*itertools.product((4, 1), (False, True), (False, True))}
    for rows in settings.values():
        assert [row["way"] for row in rows] == list(gpu.training.WAYS)
        for row in rows:
            assert [len(times) for times in row["parts_ms"].values()] == [2] * 4
            # Two steps learn 0.006 to 0.010 of the batch; BF16's digits change the loss by less than a tenth of that.
            assert row["losses"] == pytest.approx(rows[0]["losses"], abs=6e-4)
            assert row["losses"][1] < row["losses"][0] - 4e-3
        # Of weight, master, gradient and states; less than another byte for activations, FP32 norms and scales.
        for row, least in zip(rows, (16, 2 + 4 + 4 + 8, 8, 10, 8, 8, 6), strict=True):
            assert least < row["non_activation_bytes_per_parameter"] < least + 1
        assert table.count(gpu.report.COMPARISONS[0][0]) > len(settings)


@pytest.mark.parametrize("way", ["autocast", "split"])
def test_the_parts_of_a_step_are_what_they_are_called_and_add_up(monkeypatch, gpu, way):
    """With a clock that only the four calls advance, each by another time."""
    now = 0.0

    def advances(owner, name, milliseconds):
        call = getattr(owner, name)

        def timed(*args, **options):
            nonlocal now
            now += milliseconds / 1e3
            return call(*args, **options)

        monkeypatch.setattr(owner, name, timed)

    advances(LlamaForCausalLM, "forward", 1)
    advances(torch.Tensor, "backward", 20)
    advances(*((hf_lowprec.AdamW, "clip_grad_norm_") if way == "split" else (nn.utils, "clip_grad_norm_")), 300)
    advances(hf_lowprec.AdamW if way == "split" else torch.optim.AdamW, "step", 4000)
    monkeypatch.setattr(gpu.device.Rehearsal, "mark", lambda self: now)
    (name,) = (name for name, mode in gpu.training.WAYS.items() if mode == way)
    runs = {clipped: gpu.training.Run() for clipped in (False, True)}
    setting = gpu.training.Setting(1, 8)
    gpu.training.train(gpu.device.Rehearsal(), gpu.shapes.TINY, name, setting, 2, 1, runs)
    for clipped, run in runs.items():
        expected = {"forward": 1, "backward": 20, "clip": 300 * clipped, "step": 4000}
        assert run.parts_ms == {part: pytest.approx([time] * 2) for part, time in expected.items()}
        row = run.row(name, 8, 1)
        assert [row["step_ms"], *row["quartiles_ms"]] == pytest.approx([sum(expected.values())] * 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_layer_is_compiled_if_the_setting_says_so(monkeypatch, gpu, compiled):
    seen = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: seen.append(type(self)))
    shape, setting = dataclasses.replace(gpu.shapes.TINY, layers=2), gpu.training.Setting(1, 8, compiled)
    gpu.training.train(gpu.device.Rehearsal(), shape, gpu.training.AUTOCAST, setting, 1, 1, {False: gpu.training.Run()})
    assert seen == [LlamaDecoderLayer] * 2 * compiled


def test_the_order_of_ways_alternates_and_what_there_is_no_time_for_is_said(monkeypatch, gpu, tmp_path):
    order = []

    def train(device, shape, way, setting, steps, discard, runs):
        order.append(way)
        for run in runs.values():
            run.losses += [1.0]
            for times in run.parts_ms.values():
                times += [1.0, 2.0]

    monkeypatch.setattr(gpu.benchmark, "train", train)
    report = gpu.report.Report(tmp_path, "none", "today")
    benchmark = gpu.benchmark.Benchmark(gpu.device.Rehearsal(), gpu.budget.Budget(3600), report)
    report.result["parity"] = {"split": "equal", "stochastic": "weight: 1 of 7"}
    setting, ways = gpu.training.Setting(1, 8), [way for way in gpu.training.WAYS if not way.endswith("stochastic")]
    benchmark.train(setting, 2, 2, 1, 600)
    assert order == [*ways, *reversed(ways)]
    assert report.result["left_out"] == []
    benchmark.train(setting, 1, 2, 1, 0)
    assert len(order) == 2 * len(ways)
    assert report.result["left_out"] == [f"training, 1 × 8 tokens, eager: {way} in round 1" for way in ways]
    assert all(way in report.markdown.read_text() for way in ways)


def test_registers_are_limited_in_their_own_mode_and_on_a_gpu_alone(monkeypatch, gpu):
    options = launch._KernelOptions(*[{"num_warps": 4}] * 5)
    monkeypatch.setattr(gpu.candidates, "_kernel_options", lambda spec, device: options)
    during = []
    monkeypatch.setattr(hf_lowprec.AdamW, "step", lambda self, closure=None: during.append(launch._kernel_options))
    shipped = launch._kernel_options
    for mode in ("split, 8-bit states", "split, 8-bit states, 96 registers"):
        gpu.candidates.our_adamw([nn.Parameter(torch.ones(1))], mode, "auto").step()
    assert during[0] is launch._kernel_options is shipped
    assert during[1](None, torch.device("cpu")) == options
    assert during[1](None, torch.device("cuda")) == options._replace(step={"num_warps": 4, "maxnreg": 96})


def test_weights_of_o2_are_fp32_masters_rounded():
    """The masters are those of torch's AdamW on the same gradients; a loaded checkpoint has them."""
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    model, other = copy.deepcopy(exact), copy.deepcopy(exact)
    optimizer = MODES["o2"].optimizer(model, lr=1e-2)
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-2, fused=True)
    pairs = list(zip(model.parameters(), exact.parameters(), strict=True))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16, torch.float32}  # norms
    for clipped in (False, True, True):
        model(torch.randn(4, 8).bfloat16()).sum().backward()
        for param, master in pairs:
            master.grad = param.grad.float()
        if clipped:
            optimizer.clip_grad_norm_(0.1)
            assert nn.utils.clip_grad_norm_(exact.parameters(), 0.1) > 0.1
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        assert all(torch.equal(param, master.to(param.dtype)) for param, master in pairs)
        assert all(param.grad is None for param in model.parameters())
    loaded = MODES["o2"].optimizer(other, lr=1e-2)
    assert isinstance(loaded, MasterWeights)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, loaded.masters, exact.parameters()))


def test_missing_packages_are_not_our_failure(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = importlib.import_module("gpu_step")
    monkeypatch.setattr(script, "NEEDED", ("torch", "no_such_package"))
    monkeypatch.setattr(script.Budget, "stop_at_the_end", lambda self, grace: None)
    assert script.main(["--rehearse"]) == 2
    assert "pip install no_such_package" in capsys.readouterr().err


@pytest.mark.every_case
def test_a_trial_says_why_a_candidate_cannot_step(gpu):
    trial = gpu.trial
    assert trial.trial_failure("torch AdamW, BF16, fused", True, 250) == ""
    assert "ValueError" in trial.trial_failure("no such candidate", True, 250)
    begin = time.monotonic()
    assert "more than 0 s" in trial.trial_failure("torch AdamW, BF16, fused", True, 0.2)
    assert time.monotonic() - begin < 20  # the process was ended, not waited for
