"""The `triton` backend for an NVIDIA GPU, without one: its own kernels, compiled to PTX and executed in NumPy."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_lowprec.optim.backends.triton import handwritten_kernels
from hf_lowprec.optim.backends.triton import launch as triton_launch
from hf_lowprec.optim.backends.triton.triton_source import render
from hf_lowprec.optim.step.fused_group import FusedGroup
from tests.support.optim import ptx_interpreter
from tests.support.optim.ptx_compiler import compiled
from tests.support.triton_available import InPlaceOfAKernel

CAPABILITIES = (80, 90, 100, 120)
_TYPES = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32", torch.float64: "*fp64"}
_OPTIONS = ("num_warps", "enable_fp_fusion")


class EmulatedGpu:
    """A GPU of a compute capability (90 is 9.0).

    Attributes:
        tensors: returns all memory that a launch may access, besides its arguments.
        launches: how often each kernel was launched, by name.
        instructions: the number of a kernel's instructions, by name.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.tensors: Callable[[], Iterable[Tensor]] = tuple
        self.launches: Counter[str] = Counter()
        self.instructions: dict[str, int] = {}

    def kernel(self, source: str, name: str) -> _Kernel:
        """A Triton function of a Python source, which is launched as if Triton had made it."""
        return _Kernel(self, source, name)

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Run the kernels of optimizers that take their first step in this context with `backend="triton"`."""
        groups: list[FusedGroup] = []
        self.tensors = lambda: [tensor for group in groups for tensor in _tensors(group)]

        class Step(triton_launch.TritonStep):
            def __init__(step, fused_group: FusedGroup) -> None:
                super().__init__(fused_group)
                groups.append(fused_group)

        def kernels(spec):
            exists = (True, True, spec.tensor_means, spec.factored)
            return triton_launch.Kernels(
                *(
                    self.kernel(render(spec), name) if needed else None
                    for name, needed in zip(triton_launch.Kernels._fields, exists, strict=True)
                )
            )

        imported = f"from {handwritten_kernels.__name__} import square_sum"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_launch, "TritonStep", Step)
            patch.setattr(triton_launch, "kernels", kernels)
            patch.setattr(triton_launch, "check_available", lambda device: None)
            patch.setattr(handwritten_kernels, "square_sum", self.kernel(imported, "square_sum"))
            yield


def _tensors(group: FusedGroup) -> list[Tensor]:
    found = [
        tensor
        for entry in group.entries
        for tensor in (entry.weight, entry.grad, *(entry.factors or ()), *entry.states.values())
    ]
    return [tensor for tensor in [*found, *(group.matrix_slots or [])] if tensor is not None]


_program = functools.lru_cache(maxsize=8)(ptx_interpreter.Program)


class _Kernel(InPlaceOfAKernel):
    def __init__(self, gpu: EmulatedGpu, source: str, name: str) -> None:
        self._gpu, self._source, self._name = gpu, source, name

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return functools.partial(self._launch, grid[0])

    def _launch(self, blocks: int, *tensors: Tensor, **keywords: Any) -> None:
        options = tuple((name, keywords.pop(name)) for name in _OPTIONS if name in keywords)
        kinds = tuple((_TYPES[tensor.dtype], tensor.data_ptr() % 16 == 0) for tensor in tensors)
        constants = tuple(keywords.items())
        ptx, shared = compiled(self._source, self._name, kinds, constants, options, self._gpu.capability)
        program = _program(ptx, shared)
        memory = [*tensors, *self._gpu.tensors()]
        addresses = [tensor.data_ptr() for tensor in tensors]
        ptx_interpreter.run(program, blocks, addresses, memory)
        self._gpu.launches[self._name] += 1
        self._gpu.instructions[self._name] = len(program.code)
