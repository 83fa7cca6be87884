"""The `native` backend (CPU): the traced step, compiled by the system's C compiler on first use.

One shared library per layout, kept in a per-user cache under a key of source, compiler, flags and CPU. Several
processes may build at once: each compiles to a private name and renames it into place.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_lowprec.optim.batch import Batch
from hf_lowprec.optim.c_source import CHUNK, render
from hf_lowprec.optim.step import Layout

# Contraction or re-association would destroy Kahan summation and the equality of backends; no-math-errno and
# no-trapping-math only let the compiler vectorise square roots and selections. The last two are worth 7% with gcc.
FLAGS = (
    *("-std=c11", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"),
    *("-fschedule-insns", "-fsched-pressure"),
)


class CompilerError(RuntimeError):
    """There is no usable C compiler; the message says what was tried and what to do."""


def prepare(batch: Batch) -> None:
    """Compile what `batch` needs, so that running cannot fail.

    Raises:
        CompilerError: no compiler was found, or it failed.
    """
    if "kernel" not in batch.kept:
        batch.kept["kernel"], batch.kept["chunks"] = kernel(batch.layout), batch.rows.chunks(CHUNK)


def run(batch: Batch) -> None:
    """Step every parameter of `batch`, which was prepared, in place and in one call."""
    if batch.skipped:
        return
    chunks = batch.kept["chunks"]
    tables = (chunks, batch.rows.table, batch.pointers(), batch.factors(batch.scalars), batch.counts)
    # By the version of a weight autograd finds out about a write that it did not see; states are in no graph. Before
    # the step, which leaves nothing else in the caches.
    increment_version(batch.params)
    batch.kept["kernel"].step(len(chunks), *(table.data_ptr() for table in tables), torch.get_num_threads())


def measure(batch: Batch) -> Tensor:
    """The sums of the algorithm's measure over each parameter of `batch`; FP64 of shape (works)."""
    chunks = batch.kept["chunks"]
    sums = torch.empty(len(chunks), dtype=torch.float64, device="cpu")
    tables = (chunks, batch.rows.table, batch.pointers(), batch.factors(batch.scalars), sums)
    batch.kept["kernel"].measure(len(chunks), *(table.data_ptr() for table in tables), torch.get_num_threads())
    return batch.sums_by_work(chunks, sums)


@functools.cache
def _find_compiler(wanted: str) -> tuple[str, ...] | None:
    candidates = [tuple(shlex.split(wanted))] if wanted else [("cc",), ("gcc",), ("clang",)]
    return next((command for command in candidates if shutil.which(command[0])), None)


def require_compiler() -> tuple[str, ...]:
    """The C compiler's command: `$CC` if it is set, else the first of `cc`, `gcc`, `clang` on PATH.

    Raises:
        CompilerError: there is none.
    """
    wanted = os.environ.get("CC", "")
    command = _find_compiler(wanted)
    if command is None:
        what = f"$CC={wanted!r} is not a program" if wanted else "none of cc, gcc, clang is on PATH"
        raise CompilerError(
            f"backend='native' needs a C compiler and {what}; install one, set $CC, or use backend='eager'"
        )
    return command


def cache_dir() -> Path:
    """Where compiled steps are kept: `$HF_LOWPREC_CACHE`, else `hf_lowprec` in the user's cache directory."""
    if os.environ.get("HF_LOWPREC_CACHE"):
        return Path(os.environ["HF_LOWPREC_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_lowprec"


def kernel(layout: Layout) -> ctypes.CDLL:
    """The compiled functions `step` and, if it has a measure, `measure` of `layout`.

    A layout that failed to compile is not tried again.

    Raises:
        CompilerError: no compiler was found, or it failed.
    """
    compiled = _load(layout)
    if isinstance(compiled, CompilerError):
        raise compiled
    return compiled


@functools.cache
def _load(layout: Layout) -> ctypes.CDLL | CompilerError:
    try:
        library = ctypes.CDLL(str(_build(render(layout))))
    except CompilerError as error:
        return error
    except OSError as error:
        return CompilerError(
            f"the compiled step cannot be written or loaded ({error}); set HF_LOWPREC_CACHE to a folder with room from "
            "which programs may run, or use backend='eager'"
        )
    library.step.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 5, ctypes.c_int]
    library.step.restype = None
    if layout.measure is not None:
        library.measure.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 5, ctypes.c_int]
        library.measure.restype = None
    return library


def _build(source: str) -> Path:
    compiler = require_compiler()
    identity = [source, *FLAGS, *compiler, compiler_identity(compiler[0]), _cpu_identity()]
    name = f"step-{hashlib.sha256(chr(0).join(identity).encode()).hexdigest()[:32]}.so"
    directory = _writable(cache_dir())
    library = directory / name
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            path = Path(scratch) / "step.c"
            path.write_text(source)
            built = Path(scratch) / name
            _compile(compiler, path, built)
            os.replace(built, library)
    return library


def _compile(compiler: tuple[str, ...], source: Path, target: Path) -> None:
    # A compiler without OpenMP still gives a correct, single-threaded step.
    for openmp in (["-fopenmp"], []):
        command = [*compiler, *FLAGS, *openmp, str(source), "-o", str(target), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
    raise CompilerError(
        f"the C compiler failed (exit {result.returncode}): {' '.join(command)}\n{result.stderr.strip()}\n"
        "Set $CC to a working compiler or use backend='eager'."
    )


@functools.cache
def compiler_identity(compiler: str) -> str:
    """The path of the program `compiler` and what it says of its version, which may be lines."""
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{os.path.realpath(shutil.which(compiler) or compiler)} {result.stdout}"


@functools.cache
def _cpu_identity() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _writable(directory: Path) -> Path:
    """`directory`, made if need be, if only this user can write there; else one that lasts as long as this process."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
    except OSError:
        return _private_cache(directory)
    mine = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
    return directory if mine and os.access(directory, os.W_OK) else _private_cache(directory)


@functools.cache
def _private_cache(unusable: Path) -> Path:
    warnings.warn(
        f"compiled steps cannot be kept in {unusable}, where this user alone must be able to write; each process "
        "compiles its own (about a third of a second each); set HF_LOWPREC_CACHE to such a folder",
        RuntimeWarning,
        stacklevel=2,
    )
    folder = tempfile.mkdtemp(prefix="hf_lowprec-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
