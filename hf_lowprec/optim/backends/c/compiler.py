"""The system's C compiler, for the `native` backend: find it, compile a library once, and keep it.

Later processes of the same user load a library from a cache instead of compiling it again. A library runs as this user,
so the cache is used only if it belongs to this user or root, and no other user can write to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hf_lowprec.once import first_time

# Contraction or reassociation would break Kahan summation and make backends differ. -fno-math-errno and
# -fno-trapping-math let the compiler vectorize square roots and selections without changing results. -fschedule-insns
# and -fsched-pressure make the step 7% faster with gcc. For Intel's processors, compilers prefer vectors of 256 bits,
# even if there are larger ones, so that clocks stay high; but then a step would need twice the instructions.
FLAGS = (
    *("-std=c11", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"),
    *("-fschedule-insns", "-fsched-pressure"),
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
TIMEOUT = 120.0
"""Seconds that one run of the compiler may take. It usually takes a third of a second."""
_ADVICE = "Set $CC to a working compiler or use backend='eager'."
_hung: set[tuple[str, ...]] = set()
"""Compilers that exceeded TIMEOUT once; they are not started again."""


class CompilerError(RuntimeError):
    """There is no usable C compiler; the message says what was tried and what to do."""


def require_compiler() -> tuple[str, ...]:
    """Return the command of the C compiler: `$CC` if it is set, else the first of `cc`, `gcc`, `clang` on PATH.

    Raises:
        CompilerError: there is no compiler, or `$CC` is not a valid shell command.
    """
    variable = os.environ.get("CC", "").strip()
    try:
        command = _find_compiler(variable)
    except ValueError as error:
        raise CompilerError(
            f"$CC={variable!r} is not a valid shell command ({error}); correct $CC, or use backend='eager'"
        ) from None
    if command is None:
        reason = f"$CC={variable!r} is not a program" if variable else "none of cc, gcc, clang is on PATH"
        raise CompilerError(
            f"backend='native' needs a C compiler, but {reason}; install one, set $CC, or use backend='eager'"
        )
    return command


@functools.cache
def _find_compiler(variable: str) -> tuple[str, ...] | None:
    candidates = [tuple(shlex.split(variable))] if variable else [("cc",), ("gcc",), ("clang",)]
    return next((command for command in candidates if command and shutil.which(command[0])), None)


@functools.cache
def compiler_identity(compiler: str) -> str:
    """Return the path and the `--version` output (possibly several lines) of the program `compiler`.

    `native.py` makes it part of a library's file name, so that a different compiler leads to a new compilation.

    Raises:
        CompilerError: it cannot be started, or exceeds TIMEOUT.
    """
    return f"{os.path.realpath(shutil.which(compiler) or compiler)} {_run([compiler], ['--version']).output}"


def load_library(name: str, build: Callable[[Path], Path]) -> ctypes.CDLL:
    """Load the library `name` from the cache. If it is not there or cannot be loaded, build and cache it first.

    If it cannot be cached, it is built for this process only, with a warning.

    Args:
        name: the file's name.
        build: writes the library to the empty folder that it gets, and returns its file.

    Raises:
        OSError: the library cannot be written anywhere, or cannot be loaded.
    """
    cache = _usable_cache()
    if cache is not None:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(cache / name))
    with tempfile.TemporaryDirectory(prefix="hf_lowprec-") as folder:
        library = build(Path(folder))
        return ctypes.CDLL(str(library if cache is None else _cached(library, cache / name)))


def _usable_cache() -> Path | None:
    """Return the cache's folder: `$HF_LOWPREC_CACHE`, else `hf_lowprec` in the user's cache directory.

    If it cannot be created, belongs to another user, or others can write to it, warn and return None.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME", "")  # the XDG specification says to ignore a relative path
    default = f"{user_cache if os.path.isabs(user_cache) else '~/.cache'}/hf_lowprec"
    try:
        folder = Path(os.environ.get("HF_LOWPREC_CACHE") or default).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{folder} belongs to another user ({status.st_uid})")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others can write to {folder}")
        return folder
    except (OSError, RuntimeError) as error:  # there is no home directory
        _warn_not_cached(error)
        return None


def _cached(library: Path, target: Path) -> Path:
    """Copy `library` to `target` atomically, and return `target`; if that is impossible, warn and return `library`."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            os.replace(shutil.copy(library, folder), target)
        return target
    except OSError as error:
        _warn_not_cached(error)
        return library


def _warn_not_cached(reason: Exception) -> None:
    if first_time(f"not cached: {reason}"):
        warnings.warn(
            f"compiled steps cannot be cached: {reason}; each process compiles them again (about a third of a second "
            "per step); set HF_LOWPREC_CACHE to a folder that only this user can write to",
            RuntimeWarning,
            stacklevel=2,
        )


def compile_library(compiler: Sequence[str], source: str, folder: Path) -> Path:
    """Compile the C code `source` to a shared library.

    Args:
        compiler: the compiler's command.
        source: the code.
        folder: for the library and the compiler's other files.

    Returns:
        The library's file.

    Raises:
        CompilerError: the compiler cannot be started, exceeds TIMEOUT, fails, or writes no library.
        OSError: `source` cannot be written to `folder`.
    """
    code, library = folder / "step.c", folder / "step.so"
    code.write_text(source, encoding="utf-8")
    # Without OpenMP, the step is still correct, but single-threaded.
    for openmp in (["-fopenmp"], []):
        arguments = [*FLAGS, *openmp, str(code), "-o", str(library), "-lm"]
        run = _run(compiler, arguments, TMPDIR=str(folder))
        if not run.failure:
            break
    command = [*compiler, *arguments]
    if run.failure:
        raise CompilerError(
            f"the C compiler failed ({run.failure}): {shlex.join(command)}\n{run.errors.strip()}\n{_ADVICE}"
        )
    if not library.is_file():
        raise CompilerError(f"the C compiler reported success but wrote no library: {shlex.join(command)}\n{_ADVICE}")
    return library


class CompilerRun(NamedTuple):
    """The outcome of one run of the compiler.

    Attributes:
        failure: how it failed, as "exit 1" or "killed by SIGKILL"; empty for success.
        output: standard output.
        errors: standard error.
    """

    failure: str
    output: str
    errors: str


def _run(compiler: Sequence[str], arguments: Sequence[str], **environment: str) -> CompilerRun:
    """Run `compiler` until it ends; its output may be in any encoding."""
    command = [*compiler, *arguments]
    timed_out = CompilerError(
        f"the C compiler did not finish within {TIMEOUT:g} seconds: {shlex.join(command)}\n{_ADVICE}"
    )
    if tuple(compiler) in _hung:
        raise timed_out
    try:
        # In its own process group, so that processes started by the compiler can be killed with it.
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerError(f"the C compiler cannot be started ({error}): {shlex.join(command)}\n{_ADVICE}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            _hung.add(tuple(compiler))
            raise timed_out from None
        except BaseException:  # Ctrl-C reaches only this process
            _kill_group(process)
            raise
    return CompilerRun(_failure(process.returncode), *(text.decode(errors="replace") for text in (output, errors)))


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _failure(returncode: int) -> str:
    if returncode >= 0:
        return f"exit {returncode}" if returncode else ""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-returncode).name}"
    return f"killed by signal {-returncode}"
