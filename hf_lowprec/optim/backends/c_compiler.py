"""The system's C compiler: which one it is, and running it."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Contraction or re-association would destroy Kahan summation and the equality of backends; no-math-errno and
# no-trapping-math only let the compiler vectorise square roots and selections. The last two are worth 7% with gcc.
FLAGS = (
    *("-std=c11", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"),
    *("-fschedule-insns", "-fsched-pressure"),
)
TIMEOUT = 120.0
"""Seconds that one run of the compiler may take. It needs about a third of one, and more on a busy machine."""
_WAY_OUT = "Set $CC to a working compiler or use backend='eager'."
_hung: set[tuple[str, ...]] = set()
"""Compilers that did not finish. They are not waited for again."""


class CompilerError(RuntimeError):
    """There is no usable C compiler; the message says what was tried and what to do."""


class Finished(NamedTuple):
    """How a run of the compiler ended.

    Attributes:
        status: the exit status in words, empty for success.
        output: standard output.
        errors: standard error.
    """

    status: str
    output: str
    errors: str


def require_compiler() -> tuple[str, ...]:
    """The C compiler's command: `$CC` if it is set, else the first of `cc`, `gcc`, `clang` on PATH.

    Raises:
        CompilerError: there is none, or `$CC` cannot be read as a command.
    """
    wanted = os.environ.get("CC", "").strip()
    try:
        command = _find_compiler(wanted)
    except ValueError as error:
        raise CompilerError(
            f"$CC={wanted!r} cannot be read as a command ({error}); correct $CC, or use backend='eager'"
        ) from None
    if command is None:
        what = f"$CC={wanted!r} is not a program" if wanted else "none of cc, gcc, clang is on PATH"
        raise CompilerError(
            f"backend='native' needs a C compiler and {what}; install one, set $CC, or use backend='eager'"
        )
    return command


@functools.cache
def _find_compiler(wanted: str) -> tuple[str, ...] | None:
    candidates = [tuple(shlex.split(wanted))] if wanted else [("cc",), ("gcc",), ("clang",)]
    return next((command for command in candidates if command and shutil.which(command[0])), None)


@functools.cache
def compiler_identity(compiler: str) -> str:
    """The path of the program `compiler` and its `--version` output (may span several lines).

    Raises:
        CompilerError: it cannot be started, or hangs.
    """
    return f"{os.path.realpath(shutil.which(compiler) or compiler)} {_run([compiler], ['--version']).output}"


def compile_library(compiler: Sequence[str], source: str, folder: Path) -> bytes:
    """The shared library that the command `compiler` makes of the C code `source`; `folder` is for its files.

    Raises:
        CompilerError: the compiler cannot be started, hangs, fails, or writes no library.
        OSError: `source` cannot be written to `folder`.
    """
    code, library = folder / "step.c", folder / "step.so"
    code.write_text(source, encoding="utf-8")
    # A compiler without OpenMP still gives a correct, single-threaded step.
    for openmp in (["-fopenmp"], []):
        arguments = [*FLAGS, *openmp, str(code), "-o", str(library), "-lm"]
        finished = _run(compiler, arguments, TMPDIR=str(folder))
        if not finished.status:
            break
    command = [*compiler, *arguments]
    if finished.status:
        raise CompilerError(
            f"the C compiler failed ({finished.status}): {shlex.join(command)}\n{finished.errors.strip()}\n{_WAY_OUT}"
        )
    if not library.is_file():
        raise CompilerError(f"the C compiler reported success and wrote no library: {shlex.join(command)}\n{_WAY_OUT}")
    return library.read_bytes()


def _run(compiler: Sequence[str], arguments: Sequence[str], **environment: str) -> Finished:
    """Run `compiler` to its end. What it prints may be in any encoding."""
    command = [*compiler, *arguments]
    unfinished = CompilerError(
        f"the C compiler did not finish within {TIMEOUT:g} seconds: {shlex.join(command)}\n{_WAY_OUT}"
    )
    if tuple(compiler) in _hung:
        raise unfinished
    try:
        # In a process group of its own: what the compiler has started ends with it.
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerError(f"the C compiler cannot be started ({error}): {shlex.join(command)}\n{_WAY_OUT}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            _hung.add(tuple(compiler))
            raise unfinished from None
        except BaseException:  # Ctrl-C reaches this process only
            _kill_group(process)
            raise
    return Finished(_status(process.returncode), *(text.decode(errors="replace") for text in (output, errors)))


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _status(returncode: int) -> str:
    if returncode >= 0:
        return f"exit {returncode}" if returncode else ""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-returncode).name}"
    return f"killed by signal {-returncode}"
