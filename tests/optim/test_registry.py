"""A file in `optim/algorithms` is all that an algorithm needs."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_lowprec
from hf_lowprec import optim
from hf_lowprec.optim import ALGORITHMS
from hf_lowprec.rounding.random_bits import random_bits

SIGN_SGD = """
from hf_lowprec.optim.optimizer import LowPrecisionOptimizer
import torch

class SignSGD(LowPrecisionOptimizer):
    def __init__(self, params, lr=1e-3, *, maximize=False, rounding="kahan", state_dtype=None,
                 state_rounding="stochastic", seed=0, backend="auto"):
        super().__init__(params, {"lr": lr, "maximize": maximize}, rounding=rounding, state_dtype=state_dtype,
                         state_rounding=state_rounding, seed=seed, backend=backend)

    def check_hyperparameters(self, group): ...
    def states(self, group): return ()
    def scalars(self, group, lr, step): return {"lr": lr}

    @staticmethod
    def update(weight, grad, state, scalars):
        return torch.where(grad > 0, -1.0, 1.0) * scalars.lr, {}
"""

PROGRAM = """
import torch
import hf_lowprec
from transformers import TrainingArguments
assert "signsgd_bf16_kahan" in hf_lowprec.OPTIMIZER_NAMES, hf_lowprec.OPTIMIZER_NAMES
from hf_lowprec.optim import SignSGD
TrainingArguments(output_dir="out", optim="signsgd_bf16_sr")
for backend in ("eager", "native"):
    param = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    param.grad = torch.tensor([1.0, -1.0, 2.0, -2.0, 3.0], dtype=torch.bfloat16)
    hf_lowprec.SignSGD([param], lr=0.25, backend=backend).step()
    assert param.tolist() == [0.75, 1.25, 0.75, 1.25, 0.75], param
"""


@pytest.mark.every_case
def test_a_new_file_gets_names_modes_and_backends(tmp_path):
    package = Path(hf_lowprec.__file__).parent
    copy = shutil.copytree(package, tmp_path / "hf_lowprec")
    (copy / "optim" / "algorithms" / "signsgd.py").write_text(SIGN_SGD)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr


def test_the_names_are_algorithm_times_mode():
    expected = {f"{name.lower()}_bf16_{mode}" for name in ALGORITHMS for mode in ("kahan", "split", "sr")}
    assert set(hf_lowprec.OPTIMIZER_NAMES) == expected
    assert {"adamw_bf16_kahan", "adamw_bf16_split", "adamw_bf16_sr", "sgd_bf16_kahan", "sgd_bf16_sr"} <= expected
    for name, cls in ALGORITHMS.items():
        for module in (hf_lowprec, optim):
            assert getattr(module, name) is cls
            assert name in module.__all__
    assert set(hf_lowprec.__all__) - set(dir(hf_lowprec)) <= {"initialize_deepspeed"}  # which needs a library


@pytest.mark.parametrize("cls", ALGORITHMS.values())
def test_scalars_of_tensors_are_those_of_numbers(cls):
    """On the device learning rates and step counts are FP64 tensors. ρ of RAdam cancels 1999 to 1: 2000 · 2**-52."""
    optimizer = cls([torch.nn.Parameter(torch.zeros(2, 2))])
    (group,) = optimizer.param_groups
    group |= {"weight_decay": 0.1} if "weight_decay" in group else {}
    steps = torch.arange(1, 3001)
    numbers = [optimizer.scalars(group, 1e-3, step) for step in steps.tolist()]
    tensors = optimizer.scalars(group, torch.tensor(1e-3, dtype=torch.float64), steps.double())
    assert tensors.keys() == numbers[0].keys()
    for name, column in tensors.items():
        expected = torch.tensor([row[name] for row in numbers], dtype=torch.float64)
        column = torch.as_tensor(column, dtype=torch.float64).expand(3000)
        torch.testing.assert_close(column, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("cls", ALGORITHMS.values())
def test_every_state_has_random_bits_of_its_own(cls):
    """Role 0 is the weight's; two states of one role would round together. The first step begins with equal states."""
    arguments = inspect.signature(cls).parameters
    options: dict = {name: True for name in ("amsgrad", "nesterov") if name in arguments}
    options |= {"beta1": 0.9} if "beta1" in arguments else {}
    options |= {"momentum": 0.9} if options.get("nesterov") else {}
    states = {}
    for dtype in (torch.bfloat16, torch.float32):
        param = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        param.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
        optimizer = cls([param], state_dtype=dtype, seed=3, first_parameter=0, **options)
        optimizer.step()
        states[dtype] = optimizer.state[param]
    declared = optimizer.states(optimizer.param_groups[0])
    roles = [state.role for state in declared]
    assert sorted({0, *roles}) == sorted([0, *roles])
    for state in (state for state in declared if state.accumulates and not state.factored):
        bits = random_bits(seed=3, step=1, parameter=0, role=state.role, index=torch.arange(64)).view(8, 8)
        upper = (states[torch.float32][state.name].view(torch.int32) + bits) >> 16
        assert torch.equal(states[torch.bfloat16][state.name].view(torch.int16), upper.to(torch.int16)), state.name
