"""The `native` backend on a 64-bit ARM processor, which QEMU emulates: the same C code, from a cross compiler."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_lowprec.optim.backends.c.c_source import render
from hf_lowprec.optim.backends.c.compiler import FLAGS
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.optim.step.segments import segment_columns
from hf_lowprec.rounding.block_floats import BLOCK

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PROCESSORS = {"armv8-a": ["-march=armv8-a"], "SVE": ["-march=armv8.2-a+fp16+sve"]}
"""By name, what takes the place of `-march=native`: all that every 64-bit ARM processor has, and vectors of SVE."""
_FUNCTIONS = ("step", "square_sum", "tensor_sum")


def missing_programs() -> list[str]:
    """The programs that are not installed, of those that are needed."""
    return [program for program in (COMPILER, EMULATOR) if not shutil.which(program)]


class EmulatedLibrary:
    """Stands in for the library that `native.kernel` loads: same functions, same arguments.

    Attributes:
        calls: how often each function has been called, by name.
    """

    def __init__(self, spec: KernelSpec, folder: Path, processor: Sequence[str], flags: Sequence[str] = FLAGS) -> None:
        self._spec = spec
        self.calls = dict.fromkeys(_FUNCTIONS, 0)
        source, self._program = folder / "step.c", folder / "step"
        source.write_text(render(spec))
        portable = [flag for flag in flags if not flag.startswith("-m") and flag not in ("-fPIC", "-shared")]
        files = [str(source), str(Path(__file__).with_name("call_function.c")), "-o", str(self._program)]
        subprocess.run([COMPILER, *portable, *processor, "-fopenmp", "-static", *files, "-lm"], check=True)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _FUNCTIONS:
            raise AttributeError(name)

        def call(n_chunks: int, chunks: int, segments: int, pointers: int, scalars: int, last: int, threads: int):
            self.calls[name] += 1
            self._call(name, n_chunks, chunks, segments, pointers, scalars, last, threads)

        return call

    def _call(self, name: str, n_chunks: int, *addresses_and_threads: int) -> None:
        """Run the program once. Tables are passed by address, as to the functions in `c/c_source.py`."""
        chunks, segments, pointers, scalars, last, threads = addresses_and_threads
        columns = len(segment_columns(self._spec))
        n_segments = 1 + max(_integers(chunks, 2 * n_chunks)[::2], default=-1)
        rows = _integers(segments, columns * n_segments)
        n_entries = 1 + max(rows[::columns], default=-1)
        elements = [0] * n_entries
        for entry, end in zip(rows[::columns], rows[1::columns], strict=True):
            elements[entry] = max(elements[entry], end)
        scalars_read = {"step": self._spec.all_scalars, "square_sum": (), "tensor_sum": self._spec.host_scalars}
        n_scalars = len(scalars_read[name])
        places = [(last, 8 * (n_entries if name == "step" else n_chunks))]
        tensors = self._spec.tensors.items()
        sizes = [
            dtype.itemsize * (count // BLOCK if tensor in self._spec.per_block_tensors else count)
            for count in elements
            for tensor, dtype in tensors
        ]
        places += zip(_integers(pointers, len(sizes)), sizes, strict=True)
        tables = [(segments, 8 * len(rows)), (scalars, 4 * n_scalars * n_entries), places[0]]
        header = [_FUNCTIONS.index(name), n_chunks, threads, len(sizes), *(size for _, size in tables), *sizes]
        blocks = [(chunks, 16 * n_chunks), *tables, *places[1:]]
        request = struct.pack(f"<{len(header)}q", *header) + b"".join(_bytes(*block) for block in blocks)
        command = [EMULATOR, "-cpu", "max", str(self._program)]
        reply = subprocess.run(command, input=request, stdout=subprocess.PIPE, check=True, timeout=60).stdout
        assert len(reply) == sum(size for _, size in places)
        for address, size in places:
            ctypes.memmove(address, reply[:size], size)
            reply = reply[size:]


def _bytes(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size) if size else b""


def _integers(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}q", _bytes(address, 8 * count))
