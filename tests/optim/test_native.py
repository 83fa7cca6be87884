"""The `native` backend compiles once, finds what it compiled, trusts nobody else's, and says so where it cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def start(body: str, cache: Path | str, **environment: str) -> subprocess.Popen:
    inherited = {key: value for key, value in os.environ.items() if key != "CC"}
    environment = {**inherited, "HF_LOWPREC_CACHE": str(cache), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", PROGRAM + body]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


NATIVE_IS_EAGER = 'assert torch.equal(train("native"), train("eager"))\n'


@pytest.mark.parametrize("broken", [{"PATH": "/nonexistent"}, {"CC": "/bin/false"}], ids=["none", "failing"])
def test_without_a_compiler_native_raises_and_auto_warns_once(broken, tmp_path):
    body = """
try:
    train("native")
except RuntimeError as error:
    print(error)
else:
    raise SystemExit("native ran without a compiler")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for cls in (AdamW, SGD, AdamW):
        assert torch.equal(train("auto", cls), train("eager", cls))
caught = [warning for warning in caught if "eager" in str(warning.message)]
assert len(caught) == 1, [str(warning.message) for warning in caught]
assert "compiler" in str(caught[0].message)
"""
    message = finish(start(body, tmp_path, **broken))
    assert "compiler" in message
    assert "backend='eager'" in message  # the way out


def libraries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_a_second_process_finds_the_library_and_needs_no_compiler(tmp_path):
    finish(start(NATIVE_IS_EAGER, tmp_path / "new" / "cache"))
    cache = tmp_path / "new" / "cache"
    (name,) = libraries(cache)
    written = (cache / name).stat().st_mtime_ns
    finish(start(NATIVE_IS_EAGER, cache))
    assert libraries(cache) == [name]
    assert (cache / name).stat().st_mtime_ns == written


def test_processes_that_start_at_once_on_an_empty_cache(tmp_path):
    for process in [start(NATIVE_IS_EAGER, tmp_path / "cache") for _ in range(3)]:
        finish(process)
    assert len(libraries(tmp_path / "cache")) == 1  # and no half-written or private file is left


def test_only_the_layout_makes_a_library(tmp_path):
    """Not learning or decay rates, sizes, seed, or the number of tensors or steps; an option of the formula does."""
    body = """
for changed in ({}, {"lr": 1e-4}, {"lr": torch.tensor(0.3)}, {"count": 20}, {"size": 5000}, {"steps": 30}, {"seed": 7},
                {"betas": (0.5, 0.6)}, {"weight_decay": 0.3, "eps": 1e-3}):
    train("native", **changed)
print(len(os.listdir(os.environ["HF_LOWPREC_CACHE"])))
train("native", amsgrad=True)
print(len(os.listdir(os.environ["HF_LOWPREC_CACHE"])))
"""
    assert finish(start(body, tmp_path / "cache")).split() == ["1", "2"]


def test_a_directory_anybody_can_write_to_is_not_trusted(tmp_path):
    """A library somebody else put there would run as this user."""
    finish(start(NATIVE_IS_EAGER, tmp_path / "own"))
    (name,) = libraries(tmp_path / "own")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / name).write_text("not a library")
    shared.chmod(0o777)
    finish(start(NATIVE_IS_EAGER, shared))
    assert libraries(shared) == [name]
    assert (shared / name).read_text() == "not a library"


@pytest.mark.parametrize("kind", ["read-only", "below a file"])
def test_a_directory_that_cannot_be_written_to_does_no_harm(kind, tmp_path):
    cache = tmp_path / "cache"
    if kind == "read-only":
        cache.mkdir(mode=0o555)
    else:
        cache.write_text("a file")
        cache = cache / "below"
    finish(start(NATIVE_IS_EAGER, cache))
