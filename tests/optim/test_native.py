"""The `native` backend compiles once per spec, reuses what this user compiled, and says why where it cannot run."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_lowprec.optim.backends.c import compiler as c_compiler
from hf_lowprec.optim.backends.c import native
from tests.support.processes import forkserver

STEP = Path(__file__).parents[1] / "scripts" / "native_step.py"

PROGRAM = """
import os, sys, warnings
import torch
from hf_lowprec.optim import SGD, AdamW

def train(backend="auto", cls=AdamW, count=1, lr=1e-2, steps=3, size=100, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size).bfloat16()) for _ in range(count)]
    optimizer = cls(params, lr=lr, backend=backend, **options)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(size).bfloat16()
        optimizer.step()
    return torch.cat([param.detach() for param in params])
"""


def run(folder: Path, body: str, cache: Path | str, **environment: str) -> str:
    """Run PROGRAM and `body` in a process of its own, and return what it prints."""
    script = folder / "program.py"
    script.write_text(PROGRAM + body)
    done = forkserver.run(script, [], 120, **{"CC": "", "HF_LOWPREC_CACHE": str(cache), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


NATIVE_IS_EAGER = 'assert torch.equal(train("native"), train("eager"))\n'


def libraries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_a_second_process_finds_the_library_and_needs_no_compiler(tmp_path):
    cache = tmp_path / "new" / "cache"
    run(tmp_path, NATIVE_IS_EAGER, cache)
    (name,) = libraries(cache)
    written = (cache / name).stat().st_mtime_ns
    run(tmp_path, NATIVE_IS_EAGER, cache)
    assert libraries(cache) == [name]
    assert (cache / name).stat().st_mtime_ns == written


def test_processes_that_start_at_once_on_an_empty_cache(tmp_path):
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: run(tmp_path, NATIVE_IS_EAGER, tmp_path / "cache"), range(3)))
    assert len(libraries(tmp_path / "cache")) == 1  # and no half-written or private file is left


def test_only_the_spec_decides_which_library_is_compiled(tmp_path):
    """Rates, sizes, the seed and the numbers of tensors and steps need no new library; options of the formula do."""
    body = """
for changed in ({}, {"lr": 1e-4}, {"lr": torch.tensor(0.3)}, {"count": 20}, {"size": 5000}, {"steps": 30}, {"seed": 7},
                {"betas": (0.5, 0.6)}, {"weight_decay": 0.3, "eps": 1e-3}):
    train("native", **changed)
print(len(os.listdir(os.environ["HF_LOWPREC_CACHE"])))
train("native", amsgrad=True)
print(len(os.listdir(os.environ["HF_LOWPREC_CACHE"])))
"""
    assert run(tmp_path, body, tmp_path / "cache").split() == ["1", "2"]


def test_what_another_compiler_flag_or_processor_made_is_not_loaded(monkeypatch):
    names = []
    monkeypatch.setattr(native, "load_library", lambda name, *_: names.append(name))
    changes = {
        "FLAGS": ("-O1",),
        "require_compiler": lambda: ("gcc", "-O1"),
        "compiler_identity": lambda compiler: "a new version",
        "_cpu_identity": lambda: "a newer processor",
    }
    native._compiled("the step")
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(native, name, value)
            native._compiled("the step")
    assert len(set(names)) == 5


@pytest.mark.parametrize("kind", ["read-only", "below a file"])
def test_without_a_writable_cache_the_step_still_works(kind, tmp_path):
    cache = tmp_path / "cache"
    if kind == "read-only":
        cache.mkdir(mode=0o555)
    else:
        cache.write_text("a file")
        cache = cache / "below"
    run(tmp_path, NATIVE_IS_EAGER, cache)


def run_script(cache: Path | str, *changes: str, **environment: str) -> dict:
    """Run scripts/native_step.py, which steps with both backends, and return its report."""
    environment = {"CC": "", "HF_LOWPREC_CACHE": str(cache), **environment}
    done = forkserver.run(STEP, list(changes), 60, **environment)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return json.loads(done.stdout)


def script(folder: Path, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


TARGET = 'while [ "$1" != -o ]; do shift; done'
BROKEN_COMPILERS = {
    "unquoted": ("gcc '", "No closing quotation"),
    "not UTF-8": ("printf 'd\\351faut \\377' >&2; printf '\\377'; exit 1", "exit 1"),
    "hangs": ('sleep 1000 & echo $! > "${0%/*}/child"; wait', "did not finish within 1 seconds"),
    "killed": ("kill -9 $$", "killed by SIGKILL"),
    "writes nothing": ("exit 0", "reported success but wrote no library"),
    "writes something else": (f"{TARGET}; echo text > $2", "cannot be written or loaded"),
    "no program": ("", "cannot be started"),
    "none": ("", "none of cc, gcc, clang is on PATH"),
}


@pytest.mark.parametrize("kind", BROKEN_COMPILERS)
def test_if_the_compiler_fails_auto_is_eager_and_native_says_why(kind, tmp_path):
    body, cause = BROKEN_COMPILERS[kind]
    compiler = body if kind == "unquoted" else script(tmp_path, body)
    if kind == "hangs":  # in its version, which is asked first, or later
        compiler = script(tmp_path, f'[ "$1" = --version ] && exit 0\n{body}')
    if kind == "no program":
        Path(compiler).write_bytes(b"\x7fELF nonsense")
    environment = {"CC": "", "PATH": "/nonexistent"} if kind == "none" else {"CC": compiler}
    found = run_script(tmp_path / "cache", "impatient", **environment)
    assert found["error"].startswith("CompilerError: ")
    assert cause in found["error"]
    assert "backend='eager'" in found["error"]
    assert found["auto_is_eager"]
    (message,) = found["warnings"]
    assert "'eager' backend on the CPU, with the same results" in message
    assert cause in message
    if kind == "hangs":
        assert has_ended(int((tmp_path / "child").read_text()))


def has_ended(process: int) -> bool:
    """Whether a killed process is gone; init may take a moment to reap it."""
    for _ in range(500):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        if (stat := Path(f"/proc/{process}/stat")).exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    return False


def test_a_blank_cc_variable_counts_as_unset(tmp_path):
    assert run_script(tmp_path / "cache", CC="   ") == {"error": "", "auto_is_eager": True, "warnings": []}


def test_a_compiler_that_names_its_version_in_another_encoding(tmp_path):
    compiler = script(tmp_path, '[ "$1" = --version ] && printf \'v\\351rsion \\377\\n\' && exit 0\nexec cc "$@"')
    assert run_script(tmp_path / "cache", CC=compiler)["error"] == ""


def test_without_a_home_each_process_compiles(tmp_path):
    """A container may run as a user who is not in its passwd file."""
    found = run_script("", "without_passwd_entry", XDG_CACHE_HOME="", TMPDIR="/tmp")
    assert (found["error"], found["auto_is_eager"]) == ("", True)
    (message,) = found["warnings"]
    assert "cannot be cached: Could not determine home directory" in message
    assert "set HF_LOWPREC_CACHE" in message


def test_the_tilde_is_home(tmp_path):
    assert run_script("~/below", HOME=str(tmp_path))["error"] == ""
    assert len(libraries(tmp_path / "below")) == 1
    assert not Path("~").exists()


@pytest.mark.parametrize("hangs_in", ["version", "compilation"])
def test_a_compiler_that_hangs_is_waited_for_once(hangs_in, tmp_path, monkeypatch):
    count = tmp_path / "count"
    version = '[ "$1" = --version ] && exit 0\n' if hangs_in == "compilation" else ""
    compiler = script(tmp_path, f"{version}echo started >> {count}; exec sleep 1000")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(c_compiler, "TIMEOUT", 0.5)
    for k in range(3):
        with pytest.raises(c_compiler.CompilerError, match=r"did not finish within 0.5 seconds.*\n.*backend='eager'"):
            native._compiled(f"int function_{k};")
    assert count.read_text() == "started\n"
