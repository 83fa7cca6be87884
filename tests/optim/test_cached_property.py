"""Cached properties hold no lock, which a forked child would wait for if another thread held it."""

from pathlib import Path

import pytest

import hf_lowprec


@pytest.mark.parametrize("folder", ["optim", "monitor"])
def test_whatever_runs_in_a_step_uses_ours(folder):
    modules = sorted((Path(hf_lowprec.__file__).parent / folder).rglob("*.py"))
    found = [path.name for path in modules if "functools import cached_property" in path.read_text()]
    assert modules and not found
