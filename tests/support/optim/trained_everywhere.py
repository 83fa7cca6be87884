"""Three steps with any algorithm, mode, layout and kind of values: the same in every backend, bit for bit."""

import math

import torch
from torch import Tensor, nn

from hf_lowprec.rounding import MODES
from tests.support.optim.every_optimizer import build
from tests.support.optim.gradient_dtypes import allow_gradients_in
from tests.support.same_numbers import same_numbers
from tests.support.triton_available import device_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 1e-45, -1e-40, 9e-39, 0.0, -0.0, 1e-20]
LAYOUTS = {
    "chunks": [(4, 64), (33, 31), (41, 1024), (7,), (2100,), (), (0, 32)],  # the third is larger than a chunk
    "edges": [(1,), (1023,), (1024,), (1025,), (5, 0, 3), (9, 11, 13), (8191,), (8193,), (32767,), (32769,)],
    "small": [(4, 64), (33, 31), (9, 256), (7,), (1025,), (), (0, 32)],  # for Triton's interpreter
    "strided": [(33, 65), (300,), (40, 64), (4, 6, 5, 7), (6, 5, 4), (50,)],
}
"""Shapes: around a thread's, a block's and a program's share; and those of which `STRIDES` makes views."""
STRIDES = [
    lambda memory: memory.t(),
    lambda memory: memory[::3],
    lambda memory: memory[5:25, 7:50],
    lambda memory: memory.to(memory_format=torch.channels_last),
    lambda memory: memory.permute(1, 2, 0),
    lambda memory: memory[10:11],
]
VALUES = ("normal", "extreme", "every kind")

STATE_DTYPES = (BF16, FP32, torch.int8)
EVERY_MODE = [(BF16, {"rounding": rounding, "state_dtype": dtype}) for rounding in MODES for dtype in STATE_DTYPES]
EVERY_MODE += [(BF16, {"rounding": "kahan", "state_rounding": "nearest"}), (FP32, {"rounding": "kahan"})]
EVERY_MODE += [(FP16, {"rounding": "kahan"}), (FP16, {"rounding": "nearest"})]


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


def scales(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Powers of two: of every size in a row's first element, and from 1 to 2⁻³¹ in the blocks of odd rows."""
    rows, columns = (shape[0] if len(shape) > 1 else 1), (shape[-1] if shape else 1)
    of_row = torch.randint(-130, 40, (rows, *[1] * (len(shape) - 1)), generator=generator).double()
    falling = (torch.arange(columns) % 32) * (torch.arange(rows) % 2).view(-1, *[1] * (len(shape) - 1))
    return torch.exp2(of_row - falling).float().view(-1)[0] if not shape else torch.exp2(of_row - falling).float()


def trained(
    name: str, dtype: torch.dtype, backend: str, layout: str = "chunks", values: str = "every kind", **options
) -> list[Tensor]:
    """Weights and states after three steps, in which some gradients are misaligned.

    With values of every kind, weights and states get some before the second step, and gradients before the third; under
    Muon not those of matrices, where one NaN would reach all elements. "strided, copied" has the views of "strided" in
    contiguous memory. `grad_dtype` may be another one than `dtype`.
    """
    generator, device = torch.Generator().manual_seed(1), device_of(backend)
    shapes, views = LAYOUTS[layout.partition(",")[0]], STRIDES if "strided" in layout else [lambda memory: memory] * 20
    memory = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    params = [nn.Parameter(view(whole)) for whole, view in zip(memory, views, strict=False)]
    if "copied" in layout:
        params = [nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format)) for param in params]
    grad_dtype = options.pop("grad_dtype", dtype)
    allow_gradients_in(grad_dtype, params)
    special = [param for param in params if param.ndim == 1 or (param.ndim == 2 and name != "Muon")]
    optimizer = build(name, params, backend=backend, **{"lr": 1e-2, **options})
    for step in range(3):
        for param in params:
            scale = scales(param.shape, generator) if values == "extreme" else 10.0 ** (-2 * step)
            grad = (torch.randn(param.shape, generator=generator) * scale).to(grad_dtype)
            if step == 2 and values == "every kind" and any(param is one for one in special):
                grad = in_some_rows(grad, 3, generator)
            room = torch.empty(grad.numel() + 3, dtype=grad_dtype, device=device)[3 * (param.ndim == 1) :][
                : grad.numel()
            ]
            param.grad = room.view(grad.shape).copy_(grad)
        for param in special if step == 1 and values == "every kind" else ():
            states = (state for state in optimizer.state[param].values() if state.shape == param.shape)
            for tensor in [param.data, *states]:
                if tensor.dtype != torch.int8:  # codes depend on scales
                    tensor.copy_(in_some_rows(tensor.cpu(), 1, generator))
        optimizer.step()
    return [*params, *(value for param in params for value in optimizer.state[param].values())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(same_numbers(*pair) for pair in zip(first, second, strict=True))
