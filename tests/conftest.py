"""Environment variables and fixtures of all tests. Libraries read the variables when they are imported."""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator

# One thread per worker, also in processes that tests fork: a fork of several threads copies one of them, and what the
# others have begun. And nothing asks a hub for anything.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ |= {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # of pyarrow, which datasets imports
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

# pytest explains failed asserts of test modules alone, unless it is asked before the import.
pytest.register_assert_rewrite("tests.support")

if not torch.cuda.is_available():  # then Triton's kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection() -> None:
    """Collecting imports a million objects that stay. Garbage collections in between would double its time."""
    gc.disable()


@pytest.hookimpl(trylast=True)  # of what -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without HF_LOWPREC_EVERY_CASE, run the chosen cases of each test."""
    from tests.support.chosen_cases import EVERY_CASE, chosen

    cases = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("every_case"):
            cases[item.nodeid.partition("[")[0]].append(item)
    kept = {*items} if EVERY_CASE else {case for tests in cases.values() for case in chosen(tests)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> Iterator[None]:
    """Spare garbage collections what is imported by now, a million objects.

    accelerate collects at the end of every training, which took several times as long as a tiny training itself.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Restore variables: those that accelerate and transformers set must not reach processes of later tests."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    """Rank 0 of two, whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own kernels instead of oneDNN's, whose faults, if this machine has any, are not the test's."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
