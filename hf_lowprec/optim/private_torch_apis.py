"""The private names of torch that every step needs, each behind one function.

For DTensors, the public APIs cost more than the rest of a step: `to_local()` makes a new view each time, which takes
1 µs instead of 0.03 µs. `tests/optim/test_private_torch_apis.py` fails if a version of torch changes what these
functions rely on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# `map` with `getattr` runs in C, and its default serves plain tensors among DTensors.


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of each DTensor, not a view of it; return plain tensors as they are."""
    return list(map(getattr, tensors, repeat("_local_tensor"), tensors))


def dtensor_specs(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the object that describes the mesh, placements, shape and dtype of each DTensor; None for plain tensors.

    A DTensor never changes this object. FSDP2 gives all gradients of a parameter the same one.
    """
    return list(map(getattr, tensors, repeat("_spec"), repeat(None)))


def backward_pass() -> int | None:
    """Return the number of the backward pass running in this thread, or None."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number


def at_end_of_backward_pass(call: Callable[[], None]) -> None:
    """Call `call` at the end of the running backward pass, unless it is interrupted."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def dtensor_of_shard(shard: Tensor, mesh: Any, placements: Sequence[Any], full: Tensor) -> Tensor:
    """Return a DTensor whose part on this rank is `shard`, on its own device; `DTensor.from_local` would move it.

    Args:
        shard: this rank's part.
        mesh: the device mesh.
        placements: one for each dimension of `mesh`.
        full: a tensor with the shape, strides and dtype of the full tensor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(full.shape, full.stride(), full.dtype))
    return DTensor(shard.detach(), spec, requires_grad=False)


def dtensor_of_blocks(blocks: list[Tensor], offsets: list[tuple[int, ...]], like: Any) -> Tensor:
    """Return a DTensor like `like` that shows this rank's blocks to torch.distributed.checkpoint.

    Args:
        blocks: the parts of this rank's shard that are also blocks of the full tensor; at least one.
        offsets: where each one begins in the full tensor.
        like: the DTensor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    return DTensor(LocalShardsWrapper(blocks, offsets), like._spec, requires_grad=False)


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which attributes of Tensor subclasses (DTensor) are read without `__torch_function__`.

    Outside it, torch searches their classes for `__torch_function__` at each access.
    """
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def without_grad(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate like `torch.no_grad()`, but switch autograd on again even if a signal's handler raises.

    Python runs signal handlers when a Python function begins, and after a call. `torch.no_grad` consists of Python
    functions, so Ctrl-C can end it between switching autograd off and on. Here, only a call of a C function is left.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return call


def never_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate like `torch.compiler.disable`, without importing the compiler, which takes as long as importing torch.

    Nothing is compiled before other code imports it.
    """
    chosen = function

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        nonlocal chosen
        if chosen is function and "torch._dynamo" in sys.modules:
            chosen = torch.compiler.disable(function)
            torch._dynamo.decorators.skip(call)  # otherwise, `call` itself is compiled
        return chosen(*args, **kwargs)

    return call


def undecorated(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a method of torch's optimizers without its decorator, which imports the compiler."""
    return method.__wrapped__ if method.__code__ is _OF_DECORATOR else method  # type: ignore[attr-defined]


_OF_DECORATOR = torch._compile._disable_dynamo(len).__code__
