"""Cached properties hold no lock, which a forked child would wait for if another thread held it."""

import threading
from pathlib import Path

import pytest

import hf_lowprec
from hf_lowprec.optim.cached_property import cached_property


def test_one_object_does_not_wait_for_another():
    begun, ended = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, waits):
            self.waits = waits

        @cached_property
        def value(self):
            if self.waits:
                begun.set()
                assert ended.wait(60)
            return object()

    slow, quick = Slow(waits=True), Slow(waits=False)
    threads = [threading.Thread(target=lambda one=one: one.value, daemon=True) for one in (slow, quick)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(10)
    waited = threads[1].is_alive()
    ended.set()
    threads[0].join()
    assert not waited
    assert quick.value is quick.value


@pytest.mark.parametrize("folder", ["optim", "monitor"])
def test_whatever_runs_in_a_step_uses_it(folder):
    modules = sorted((Path(hf_lowprec.__file__).parent / folder).rglob("*.py"))
    found = [path.name for path in modules if "functools import cached_property" in path.read_text()]
    assert modules and not found
