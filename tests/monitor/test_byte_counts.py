"""States in 8 bits in numbers: what is counted before training is what steps allocate, and the report says it."""

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.integrations.transformers.precision_report import precision_report
from hf_lowprec.monitor.byte_counts import elements_kept_in_bf16, expected_memory
from tests.support.memory_use import memory_use

INT8 = torch.int8
ROWS, COLUMNS, ODD = 2048, 512, 40


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, COLUMNS), nn.Linear(ODD, COLUMNS, bias=False))


def allocated(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the memory behind the states, padding included."""
    tensors = (value for state in optimizer.state.values() for name, value in state.items() if name != "step")
    return sum(storage.nbytes() for storage in {t.data_ptr(): t.untyped_storage() for t in tensors}.values())


@pytest.mark.parametrize(("rounding", "each"), [("stochastic", 6.06), ("kahan", 8.06), ("split", 8.06)])
def test_bytes_per_parameter(rounding, each):
    """Two bytes for weight and gradient each, two for a compensation or remainder, and 1 + 1/32 for each moment."""
    trained = model()[:2].bfloat16()
    optimizer = hf_lowprec.AdamW(trained.parameters(), rounding=rounding, state_dtype=INT8)
    expected = expected_memory(trained, optimizer)
    for param in trained.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    held = memory_use(trained, optimizer)
    assert held.weights + held.gradients == expected.weights + expected.gradients
    assert held.state - expected.state == {torch.int64: 8 * len(optimizer.state)}  # the step counts
    assert sum(expected.state.values()) == pytest.approx(allocated(optimizer), rel=0.03)
    assert expected.total / expected.parameters == pytest.approx(each, abs=0.005)


def test_what_stays_in_bf16_is_named():
    trained = model()
    cast = hf_lowprec.cast_model(trained)
    options = {"state_dtype": INT8, "amsgrad": True, "rounding": "stochastic"}
    optimizer = hf_lowprec.AdamW(trained.parameters(), **options)
    in_blocks, others = ROWS * COLUMNS + COLUMNS**2, COLUMNS + ODD * COLUMNS
    kept = elements_kept_in_bf16(optimizer)
    reasons = {"rows are not multiples of 32 elements": 2 * others}
    reasons["max_exp_avg_sq does not average over steps"] = in_blocks + others
    assert kept == reasons
    lines = precision_report(trained, optimizer, cast).splitlines()
    for reason, elements in reasons.items():
        assert f"  not in 8 bits   {elements:,} elements in bfloat16: {reason}" in lines
    (line,) = (line for line in lines if line.strip().startswith("exp_avg_sq"))
    size = in_blocks * 33 // 32 + 2 * others
    assert f"{size / 2**20:,.1f} MiB" in line
    assert f"{size / (in_blocks + others):.2f} bytes/parameter" in line
    assert f"(int8 {in_blocks:,}, bfloat16 {others:,}, scales {in_blocks // 32:,})" in line
    assert not any("_scale" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"rounding": "split", "state_dtype": INT8}, "split, 8-bit states stochastic"),
        ({"rounding": "kahan", "state_dtype": INT8}, "kahan, 16-bit and 8-bit states stochastic"),
        ({"rounding": "split", "state_dtype": torch.float32}, "split"),
        ({"rounding": "split", "state_rounding": "nearest"}, "split, 16-bit states nearest"),
        ({"rounding": "stochastic"}, "stochastic with error feedback, 16-bit states stochastic"),
        ({"rounding": "stochastic", "error_feedback": False}, "stochastic, 16-bit states stochastic"),
    ],
)
def test_the_report_says_how_weights_and_the_states_that_there_are_are_rounded(options, how):
    trained = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64))
    cast = hf_lowprec.cast_model(trained)
    groups = [{"params": part.parameters()} for part in trained]  # as Trainer's: that of the norms is FP32
    lines = precision_report(trained, hf_lowprec.AdamW(groups, **options), cast).splitlines()
    assert f"  rounding        weights {how}, seed 0" in lines
