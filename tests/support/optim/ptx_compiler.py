"""Triton's PTX for any NVIDIA GPU, made in a process of its own: in that of the tests, its kernels are interpreted."""

from __future__ import annotations

import functools
import linecache
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock


@functools.cache
def compiled(
    source: str,
    name: str,
    kinds: tuple[tuple[str, bool], ...],
    constants: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...],
    capability: int,
) -> tuple[str, int]:
    """The PTX of a kernel, and its bytes of shared memory per block.

    Args:
        source: Python, with the kernel as a function.
        name: of the function.
        kinds: the types of its arguments, and whether they are multiples of 16.
        constants: by name.
        options: of the compiler.
        capability: the GPU's; 90 is 9.0.
    """
    return _compiler().submit(_compile, source, name, kinds, constants, options, capability).result()


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    folder = tempfile.TemporaryDirectory()
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare, (folder.name,))
    pool.folder = folder  # deleted with it
    return pool


def _prepare(cache: str) -> None:
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}


def _compile(source, name, kinds, constants, options, capability) -> tuple[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    class UpToPtx(CUDABackend):
        def add_stages(self, stages, *arguments):
            super().add_stages(stages, *arguments)
            stages["cubin"] = lambda ptx, metadata: b""

    file = f"<{hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "kernels"}
    exec(compile(source, file, "exec"), namespace)
    function = namespace[name]
    signature = dict(zip(function.arg_names, [kind for kind, _ in kinds], strict=False))
    signature |= dict.fromkeys([*function.arg_names][len(kinds) :], "constexpr")
    aligned = {(k,): [["tt.divisibility", 16]] for k, (_, multiple) in enumerate(kinds) if multiple}
    with mock.patch.object(triton.compiler.compiler, "make_backend", UpToPtx):
        compiled = triton.compile(
            triton.compiler.ASTSource(function, signature, dict(constants), aligned),
            target=GPUTarget("cuda", capability, 32),
            options=dict(options),
        )
    return compiled.asm["ptx"], compiled.metadata.shared
