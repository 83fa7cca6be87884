"""The `native` backend compiles once per spec, keeps libraries in a cache, and says why where it cannot run.

What others can write to never runs; a library that cannot be cached is built by every process.
"""

import errno
import json
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_lowprec import once
from hf_lowprec.optim import AdamW
from hf_lowprec.optim.backends import selection
from hf_lowprec.optim.backends.c import compiler as c_compiler
from hf_lowprec.optim.backends.c import native
from hf_lowprec.optim.backends.c.c_source import render
from hf_lowprec.optim.backends.c.compiler import FLAGS, compile_library, load_library, require_compiler
from hf_lowprec.optim.backends.eager import EagerStep
from hf_lowprec.optim.backends.triton import availability as triton_availability
from hf_lowprec.optim.backends.triton import launch as triton_launch
from tests.support.processes import forkserver

STEP = Path(__file__).parents[1] / "scripts" / "native_step.py"


def libraries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_processes_that_start_at_once_on_an_empty_cache(tmp_path):
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda _: run_script(tmp_path / "cache"), range(3))
        assert [each["error"] for each in found] == [""] * 3
    assert len(libraries(tmp_path / "cache")) == 1  # and no half-written or private file is left


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty cache, in a process that has loaded nothing."""
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path))
    native._load.cache_clear()
    yield tmp_path
    native._load.cache_clear()


def test_only_the_spec_decides_which_library_is_compiled(own_cache):
    """Rates, sizes, the seed and the numbers of tensors and steps need no new library; options of the formula do."""
    changes = [{}, {"lr": 1e-4}, {"lr": torch.tensor(0.3)}, {"seed": 7}, {"betas": (0.5, 0.6)}, {"eps": 1e-3}]
    for number, options in enumerate([*changes, {"amsgrad": True}]):
        params = [nn.Parameter(torch.ones(100 * number + 1).bfloat16()) for _ in range(number + 1)]
        optimizer = AdamW(params, backend="native", **options)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        assert len(libraries(own_cache)) == 1 + ("amsgrad" in options)


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


def test_a_compiler_that_cc_names_is_not_replaced_by_another(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(
        c_compiler.CompilerError, match=r"\$CC='no-such-compiler -O2' is not a program.*backend='eager'"
    ):
        AdamW([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], backend="native")


def test_a_compiler_may_have_arguments(monkeypatch, own_cache):
    monkeypatch.setenv("CC", f"{require_compiler()[0]} -DNOTHING")
    params = [nn.Parameter(torch.ones(5, dtype=torch.bfloat16))]
    params[0].grad = torch.ones_like(params[0])
    AdamW(params, backend="native").step()
    assert len(libraries(own_cache)) == 1


# The cache.

NAME = "step-0123.so"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-512 belongs to x86-64")
def test_vectors_have_512_bits_on_processors_of_intel(tmp_path):
    """Compilers prefer 256 bits there, which takes twice the instructions."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    with AdamW([param], backend="eager").plan_step() as plan:
        source = render(plan.fused_groups[0].spec)
    file = tmp_path / "step.c"
    file.write_text(source)
    processor = ["-mtune=skylake-avx512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
    command = [*require_compiler(), *processor, *FLAGS, "-fopenmp", "-S", "-o", "-", str(file)]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    roots = re.findall(r"vsqrtps.*%([xyz]mm)", assembly)
    assert "zmm" in roots


def compiled(folder: Path, code: str) -> Path:
    return compile_library(require_compiler(), code, folder)


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> Path:
    return compiled(tmp_path_factory.mktemp("right"), "int answer(void) { return 42; }")


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """A library that creates a file when it is loaded, before any function is called."""
    code = """
    #include <fcntl.h>
    __attribute__((constructor)) static void loaded(void) { open("planted-ran", O_CREAT | O_WRONLY, 0600); }
    int answer(void) { return 13; }
    """
    return compiled(tmp_path_factory.mktemp("planted"), code)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache. Temporary files have a folder of their own, which is the working directory, too."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.chdir(temporary)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(once, "_said", set())
    return tmp_path / "cache"


def load(library: Path | None) -> tuple[int, list[str]]:
    """Load `library` through the cache, None if it must be cached already; return `answer()` and the warnings."""

    def build(folder: Path) -> Path:
        assert library is not None
        assert list(folder.iterdir()) == []
        return Path(shutil.copy(library, folder))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = load_library(NAME, build).answer()
    assert list(Path(tempfile.gettempdir()).iterdir()) == []  # not even `planted-ran`
    return answer, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("relative", [False, True])
def test_a_library_is_built_once(cache, right, relative, monkeypatch):
    if relative:
        cache.mkdir(mode=0o700)
        monkeypatch.chdir(cache)
        monkeypatch.setenv("HF_LOWPREC_CACHE", ".")
    assert load(right) == (42, [])
    assert load(None) == (42, [])
    assert [path.name for path in cache.iterdir()] == [NAME]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_file_that_cannot_be_loaded_is_replaced(cache, right):
    cache.mkdir(mode=0o700)
    (cache / NAME).write_text("not a library")
    assert load(right) == (42, [])
    assert (cache / NAME).read_bytes() == right.read_bytes()


def test_a_folder_in_place_of_the_library(cache, right):
    """The folder is not removed, and the library still loads."""
    (cache / NAME).mkdir(parents=True)
    cache.chmod(0o700)
    answer, (message,) = load(right)
    assert answer == 42
    assert "cannot be cached" in message
    assert [path.name for path in cache.iterdir()] == [NAME] and (cache / NAME).is_dir()


def test_a_cache_below_a_file_is_none(cache, right, monkeypatch):
    cache.write_text("a file")
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(cache / "below"))
    answer, (message,) = load(right)
    assert answer == 42
    assert "cannot be cached" in message


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(cache, right, planted, mode):
    cache.mkdir()
    shutil.copy(planted, cache / NAME)
    cache.chmod(mode)
    answer, (message,) = load(right)
    assert answer == 42
    assert f"others can write to {cache}; each process" in message
    assert "set HF_LOWPREC_CACHE to a folder that only this user can write to" in message
    assert load(right) == (42, [])  # said once
    assert (cache / NAME).read_bytes() == planted.read_bytes()


def test_a_folder_of_another_user_is_not_used(cache, right, planted, monkeypatch):
    cache.mkdir(mode=0o700)
    shutil.copy(planted, cache / NAME)
    if os.geteuid() == 0:
        os.chown(cache, 65534, -1)
    else:  # without the right to give it away, pretend to be another user
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    answer, (message,) = load(right)
    assert answer == 42
    assert f"{cache} belongs to another user" in message


def test_a_full_disk_keeps_nothing_and_says_so(cache, right, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        answer, (message,) = load(right)
    assert answer == 42
    assert "compiled steps cannot be cached: [Errno 28] No space left on device" in message
    assert list(cache.iterdir()) == []
    assert load(right) == (42, [])
    assert [path.name for path in cache.iterdir()] == [NAME]


def test_the_default_follows_the_users_directories(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_LOWPREC_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for xdg, expected in (("", ".cache"), (str(tmp_path / "here"), "here"), ("relative", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert c_compiler._usable_cache() == tmp_path / expected / "hf_lowprec"


# Which backend runs.


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for it to run on")
def test_triton_without_a_gpu_says_why_and_what_can(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="runs on a GPU, but there is none") as raised:
        AdamW(params(), backend="triton")
    assert all(word in str(raised.value) for word in ("backend", "triton", "eager", "native", "TRITON_INTERPRET"))


def test_triton_without_triton_says_why_and_what_can(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="needs the package triton") as raised:
        AdamW(params(), backend="triton")
    assert all(word in str(raised.value) for word in ("pip install triton", "eager", "native"))


def test_auto_on_a_gpu_without_a_working_triton_warns_and_is_eager(monkeypatch):
    """As on an image without a C compiler, where Triton cannot build its launcher."""

    def cannot(fused_group):
        raise triton_availability.TritonError("no compiler")

    monkeypatch.setattr(triton_availability, "supports_bfloat16", lambda device: True)
    monkeypatch.setattr(triton_availability, "check_available", lambda device=None: None)
    monkeypatch.setattr(triton_launch, "TritonStep", cannot)
    monkeypatch.setattr(once, "_said", set())
    gpu = torch.device("cuda", 0)
    with pytest.warns(RuntimeWarning, match="'eager' backend on cuda:0, with the same results: no compiler"):
        assert type(selection.build_backend_step("auto", SimpleNamespace(device=gpu))) is EagerStep
    with pytest.raises(triton_availability.TritonError, match="no compiler"):
        selection.build_backend_step("triton", SimpleNamespace(device=gpu))
