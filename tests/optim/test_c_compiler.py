"""The C compiler: what its flags make of a step, and the cache of libraries.

What others can write to never runs; a library that cannot be cached is built.
"""

import errno
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from hf_lowprec import once
from hf_lowprec.optim import AdamW
from hf_lowprec.optim.backends.c import compiler as c_compiler
from hf_lowprec.optim.backends.c import native
from hf_lowprec.optim.backends.c.c_source import render
from hf_lowprec.optim.backends.c.compiler import FLAGS, CompilerError, compile_library, load_library, require_compiler

NAME = "step-0123.so"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-512 belongs to x86-64")
def test_vectors_have_512_bits_on_processors_of_intel(tmp_path):
    """Compilers prefer 256 bits there, which takes twice the instructions."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
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


def test_a_library_is_built_once(cache, right):
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


def test_a_relative_path_is_below_the_working_directory(cache, right, monkeypatch):
    cache.mkdir(mode=0o700)
    monkeypatch.chdir(cache)
    monkeypatch.setenv("HF_LOWPREC_CACHE", ".")
    assert load(right) == (42, [])
    assert [path.name for path in cache.iterdir()] == [NAME]
    assert load(None) == (42, [])


def test_the_default_follows_the_users_directories(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_LOWPREC_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for xdg, expected in (("", ".cache"), (str(tmp_path / "here"), "here"), ("relative", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert c_compiler._usable_cache() == tmp_path / expected / "hf_lowprec"


def test_a_compiler_that_cc_names_is_not_replaced_by_another(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(CompilerError, match=r"\$CC='no-such-compiler -O2' is not a program.*backend='eager'"):
        AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], backend="native")


def test_a_compiler_may_have_arguments(monkeypatch, tmp_path):
    path = require_compiler()[0]
    monkeypatch.setenv("CC", f"{path} -DNOTHING")
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path))
    native._load.cache_clear()
    params = [torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))]
    params[0].grad = torch.ones_like(params[0])
    AdamW(params, backend="native").step()
    assert len(list(tmp_path.glob("*.so"))) == 1
    native._load.cache_clear()
