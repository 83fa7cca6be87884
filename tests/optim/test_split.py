"""Split weights in training: FP32 optimizers, bit for bit, whose model computes with the nearest BF16 weights."""

import copy

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.optim import AdamW
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.rounding import MODES, join
from tests.support.optim.every_optimizer import OPTIONS, build
from tests.support.random_numbers import randn
from tests.support.rounding.kept_low_bits import kept_values
from tests.support.triton_available import rarely_on_triton

BF16, FP16, FP32, INT16 = torch.bfloat16, torch.float16, torch.float32, torch.int16
EXACT = {"rounding": "split", "state_dtype": FP32}


def start(*shape: int) -> torch.Tensor:
    """BF16 weights whose magnitudes run over four orders."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        values = torch.randn(shape, generator=generator) * 10.0 ** -torch.randint(0, 4, shape, generator=generator)
    return values.to(torch.get_default_device(), BF16)


def gradient(step: int, *shape: int) -> torch.Tensor:
    noise = randn(*shape, seed=step)
    return (noise * (1.0 if step % 1000 < 500 else 0.1)).to(BF16)


def master(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    return join(param.detach().float(), optimizer.state[param]["remainder"].int())


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
    """Matrices that are orthogonalized go through BF16 in both."""
    shapes = [(6, 5), (33,)]
    split = [nn.Parameter(start(*shape)) for shape in shapes]
    exact = [nn.Parameter(start(*shape).float()) for shape in shapes]
    options = {"lr": 1e-3, "backend": any_backend, **OPTIONS[name][0]}
    pair = build(name, split, **options, **EXACT), build(name, exact, **options)
    for step in range(5):
        for optimizer, params in zip(pair, (split, exact), strict=True):
            for param in params:
                param.grad = gradient(step, *param.shape).to(param.dtype)
            optimizer.step()
        for param, reference in zip(split, exact, strict=True):
            assert torch.equal(master(pair[0], param), reference.detach())
            assert_nearest(param, reference.detach())


def test_an_fp32_model_keeps_every_digit():
    """Except one unit of the last place of ties that are rounded down, of which a tensor of FP16 numbers is full."""
    model, exact = nn.Linear(64, 64), nn.Linear(64, 64)
    with torch.no_grad():
        model.bias.copy_(torch.randn(64).half())
        for param, reference in zip(model.parameters(), exact.parameters(), strict=True):
            reference.copy_(kept_values(param))
    assert not torch.equal(model.bias, exact.bias)
    hf_lowprec.cast_model(model)
    optimizers = [
        AdamW(model.parameters(), lr=1e-5, rounding="split", state_dtype=FP32),
        AdamW(exact.parameters(), lr=1e-5),
    ]
    before = hf_lowprec.fp32_state_dict(model, optimizers[0])
    assert all(torch.equal(value, exact.state_dict()[name]) for name, value in before.items())
    for step in range(3):
        for optimizer, trained in zip(optimizers, (model, exact), strict=True):
            for param in trained.parameters():
                param.grad = gradient(step, *param.shape).to(param.dtype)
            optimizer.step()
        found = hf_lowprec.fp32_state_dict(model, optimizers[0])
        for name, reference in exact.state_dict().items():
            assert torch.equal(found[name], reference)
            assert_nearest(model.get_parameter(name), reference)


@pytest.mark.parametrize(
    ("remainder", "words"),
    [
        (torch.zeros(7), "remainder of parameter 0 has dtype torch.float32; it must be int16"),
        (torch.zeros(7, 3, dtype=torch.uint8), r"remainder of parameter 0 has shape \(7, 3\).*\(7,\)"),
    ],
)
def test_a_remainder_of_another_dtype_or_of_other_bytes_is_not_loaded(remainder, words):
    param = nn.Parameter(start(7))
    optimizer = AdamW([param], rounding="split")
    param.grad = gradient(0, 7)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["remainder"] = remainder
    with pytest.raises(ValueError, match=words):
        AdamW([param], rounding="split").load_state_dict(saved)


@pytest.mark.parametrize("rounding", [name for name, mode in MODES.items() if mode.auxiliary])
def test_a_parameter_that_was_cast_to_fp32_later_says_how_to_join_it(rounding):
    param = nn.Parameter(start(40))
    optimizer = AdamW([param], lr=1e-3, rounding=rounding)
    param.grad = gradient(0, 40)
    optimizer.step()
    exact = hf_lowprec.fp32_state_dict(nn.ParameterList([param]), optimizer)["0"]
    assert not torch.equal(exact, param.float())
    param.data = param.data.float()
    param.grad = gradient(1, 40).float()
    with pytest.raises(ValueError, match=r"param.data.copy_\(hf_lowprec.rounding.fp32_value") as raised:
        optimizer.step()
    advice = str(raised.value).split("Join both, ")[1].split(", or build")[0]
    exec(advice, {"param": param, "optimizer": optimizer, "hf_lowprec": hf_lowprec})
    assert torch.equal(param.detach(), exact)
