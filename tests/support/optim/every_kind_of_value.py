"""Steps on values of every kind, with every optimizer in every mode: the same in every backend, bit for bit."""

import math

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import MODES
from tests.support.optim.every_optimizer import build
from tests.support.same_numbers import same_numbers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 1e-45, -1e-40, 9e-39, 0.0, -0.0, 1e-20]
SHAPES = [(4, 64), (33, 31), (41, 1024), (7,), (2100,), (), (0, 32)]
"""The third has more elements than a chunk."""

STATE_DTYPES = (BF16, FP32, torch.int8)
SPECIAL_MODES = [(BF16, {"rounding": "kahan", "state_rounding": "nearest"}), (FP32, {"rounding": "kahan"})]
SPECIAL_MODES += [(FP16, {"rounding": "kahan"}), (FP16, {"rounding": "nearest"})]
EVERY_MODE = [(BF16, {"rounding": rounding, "state_dtype": dtype}) for rounding in MODES for dtype in STATE_DTYPES]
EVERY_MODE += SPECIAL_MODES
TWO_MODES = [(BF16, {"rounding": "kahan"}), (BF16, {"rounding": "stochastic", "state_dtype": torch.int8})]


def values_of_every_kind(like: Tensor, generator: torch.Generator) -> Tensor:
    """Bit patterns at random, one in three of them that of a special value; floats among them NaN of every payload."""
    integer = INTEGERS[like.element_size()]
    bounds = torch.iinfo(integer)
    random = torch.randint(bounds.min, bounds.max, like.shape, generator=generator, dtype=integer)
    special = torch.tensor([bounds.min, bounds.max, -1, 0, 1], dtype=integer)
    if like.is_floating_point():
        special = torch.cat([special, torch.tensor(SPECIAL).to(like.dtype).view(integer)])
    chosen = special[torch.randint(len(special), like.shape, generator=generator)]
    return torch.where(torch.rand(like.shape, generator=generator) < 1 / 3, chosen, random).view(like.dtype)


def in_some_rows(tensor: Tensor, together: int, generator: torch.Generator) -> Tensor:
    """Of every three rows, or times `together`, one gets such values, one gets a few of them, and one none."""
    share = torch.tensor([0.0, 0.02, 1.0])[torch.arange(len(tensor)) // together % 3]
    chosen = torch.rand(tensor.shape, generator=generator) < share.view(-1, *[1] * (tensor.ndim - 1))
    return torch.where(chosen, values_of_every_kind(tensor, generator), tensor)


def trained(name: str, dtype: torch.dtype, backend: str, **options) -> list[Tensor]:
    """Weights and states after three steps. They get values of every kind before the second step, and gradients before
    the third; under Muon not those of matrices, where one NaN would reach all elements. Some gradients are misaligned.
    """
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    special = [param for param in params if param.ndim == 1 or (param.ndim == 2 and name != "Muon")]
    optimizer = build(name, params, backend=backend, lr=1e-2, **options)
    for step in range(3):
        for param in params:
            grad = (torch.randn(param.shape, generator=generator) * 10.0 ** (-2 * step)).to(dtype)
            if step == 2 and any(param is one for one in special):
                grad = in_some_rows(grad, 3, generator)
            room = torch.empty(grad.numel() + 3, dtype=dtype)[3 * (param.ndim == 1) :][: grad.numel()]
            param.grad = room.view(grad.shape).copy_(grad)
        for param in special if step == 1 else ():
            states = (state for state in optimizer.state[param].values() if state.shape == param.shape)
            for tensor in [param.data, *states]:
                if tensor.dtype != options.get("state_dtype") or tensor.is_floating_point():  # codes depend on scales
                    tensor.copy_(in_some_rows(tensor, 1, generator))
        optimizer.step()
    return [*params, *(value for param in params for value in optimizer.state[param].values())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(same_numbers(*pair) for pair in zip(first, second, strict=True))
