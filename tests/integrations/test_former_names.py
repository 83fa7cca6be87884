"""Pickles of earlier versions refer to modules that no longer exist."""

import pickle

import pytest

from hf_lowprec.integrations.former_names import FORMER_NAMES

PAIRS = [(module, name) for module, names in FORMER_NAMES.items() for name in names]


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_a_former_name_is_found(module, name):
    found = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert f"{found.__module__}.{found.__qualname__}" == FORMER_NAMES[module][name]
    assert found.__module__ != module


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="_Methods"):
        pickle.loads(b"chf_lowprec.integrations.accelerator\n_Methods\n.")
