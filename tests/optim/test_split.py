"""Split weights in training: FP32 optimizers, bit for bit, whose model computes with the nearest BF16 weights."""

import copy

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.optim import AdamW
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.rounding import MODES
from tests.support.optim.every_optimizer import OPTIONS, build
from tests.support.random_numbers import randn
from tests.support.rounding.kept_low_bits import kept_values
from tests.support.triton_available import rarely_on_triton

BF16, FP32, INT16 = torch.bfloat16, torch.float32, torch.int16
EXACT = {"rounding": "split", "state_dtype": FP32}


def start(*shape: int) -> torch.Tensor:
    """FP32 weights whose magnitudes run over four orders, and one unit less where a cast rounds a tie down."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        values = torch.randn(shape, generator=generator) * 10.0 ** -torch.randint(0, 4, shape, generator=generator)
        values.view(-1)[::4] = values.view(-1)[::4].half()  # of which every eighth is a tie
    return kept_values(values).to(torch.get_default_device())


def gradient(step: int, *shape: int) -> torch.Tensor:
    noise = randn(*shape, seed=step)
    return (noise * (1.0 if step % 1000 < 500 else 0.1)).to(BF16)


def assert_nearest(weight: torch.Tensor, exact: torch.Tensor) -> None:
    """No BF16 number is nearer, so the weight is within half an ulp of its master."""
    patterns = weight.detach().contiguous().view(INT16)
    distance = (weight.detach().double() - exact.double()).abs()
    for step in (-1, 1):
        neighbour = (patterns + step).view(BF16).double()
        assert (distance <= (neighbour - exact.double()).abs()).all()


@rarely_on_triton()
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_is_its_fp32_self(name, any_backend):
    """From the FP32 weights of a model that was cast. Matrices that are orthogonalized go through BF16 in both."""
    exact = nn.ParameterList([start(6, 5), start(33)])
    split = copy.deepcopy(exact)
    hf_lowprec.cast_model(split)
    options = {"lr": 1e-3, "backend": any_backend, **OPTIONS[name][0]}
    pair = build(name, split, **options, **EXACT), build(name, exact, **options)
    for step in range(5):
        for optimizer, params in zip(pair, (split, exact), strict=True):
            for param in params:
                param.grad = gradient(step, *param.shape).to(param.dtype)
            optimizer.step()
        found = hf_lowprec.fp32_state_dict(split, pair[0])
        for number, (param, reference) in enumerate(zip(split, exact, strict=True)):
            assert torch.equal(found[str(number)], reference.detach())
            assert_nearest(param, reference.detach())


@pytest.mark.parametrize(
    ("remainder", "words"),
    [
        (torch.zeros(7), "remainder of parameter 0 has dtype torch.float32; it must be int16"),
        (torch.zeros(7, 3, dtype=torch.uint8), r"remainder of parameter 0 has shape \(7, 3\).*\(7,\)"),
    ],
)
def test_a_remainder_of_another_dtype_or_of_other_bytes_is_not_loaded(remainder, words):
    param = nn.Parameter(start(7).to(BF16))
    optimizer = AdamW([param], rounding="split")
    param.grad = gradient(0, 7)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["remainder"] = remainder
    with pytest.raises(ValueError, match=words):
        AdamW([param], rounding="split").load_state_dict(saved)


@pytest.mark.parametrize("rounding", [name for name, mode in MODES.items() if mode.auxiliary])
def test_a_parameter_that_was_cast_to_fp32_later_says_how_to_join_it(rounding):
    param = nn.Parameter(start(40).to(BF16))
    optimizer = AdamW([param], lr=1e-3, rounding=rounding)
    param.grad = gradient(0, 40)
    optimizer.step()
    exact = hf_lowprec.fp32_state_dict(nn.ParameterList([param]), optimizer)["0"]
    assert not torch.equal(exact, param.float())
    param.data = param.data.float()
    param.grad = gradient(1, 40).float()
    with pytest.raises(ValueError, match=r"param.data.copy_\(hf_lowprec.rounding.fp32_value") as raised:
        optimizer.step()
    advice = str(raised.value).split("Merge them, ")[1].split(", or build")[0]
    exec(advice, {"param": param, "optimizer": optimizer, "hf_lowprec": hf_lowprec})
    assert torch.equal(param.detach(), exact)
