"""`when_imported`: a function runs when a module is imported, and the import is otherwise as it always is."""

import importlib
import importlib.util
import inspect
import sys

import pytest

import hf_lowprec
from hf_lowprec.import_hook import when_imported
from tests.support.processes.ranks import run_script

NEEDS_DEEPSPEED = {"initialize_deepspeed"}
SOURCE = "NUMBER = 1\n\ndef function():\n    return NUMBER\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that was never imported, with a package of the same content."""
    monkeypatch.setattr("hf_lowprec.import_hook._actions", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    name = f"imported_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SOURCE)
    yield name
    sys.modules.pop(name, None)


def test_the_function_sees_the_complete_module(module):
    seen = []
    when_imported(module, lambda: seen.append(sys.modules[module].NUMBER))
    assert seen == []
    importlib.import_module(module)
    importlib.import_module(module)
    assert seen == [1]


def test_it_runs_at_once_for_a_module_that_was_imported(module):
    importlib.import_module(module)
    seen = []
    when_imported(module, lambda: seen.append(1))
    assert seen == [1]


def test_searching_for_the_module_does_not_count_as_importing_it(module):
    seen = []
    when_imported(module, lambda: seen.append(1))
    assert importlib.util.find_spec(module).origin.endswith(f"{module}.py")
    assert seen == []
    importlib.import_module(module)
    assert seen == [1]


def test_a_reload_counts(module):
    seen = []
    when_imported(module, lambda: seen.append(1))
    importlib.reload(importlib.import_module(module))
    assert seen == [1, 1]


def test_the_module_keeps_its_own_loader_and_source(module):
    plain = importlib.import_module(module)
    expected = type(plain.__loader__), plain.__spec__.origin
    del sys.modules[module]
    when_imported(module, lambda: None)
    imported = importlib.import_module(module)
    assert (type(imported.__loader__), imported.__spec__.origin) == expected
    assert imported.__spec__.loader is imported.__loader__
    assert inspect.getsource(imported.function) == SOURCE.partition("\n\n")[2]


def test_a_module_that_does_not_exist_is_still_not_found(module):
    when_imported("a_module_that_does_not_exist", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_does_not_exist"):
        importlib.import_module("a_module_that_does_not_exist")


def test_a_module_that_fails_fails_as_always(module, tmp_path):
    (tmp_path / f"{module}.py").write_text("raise OSError('no luck')")
    seen = []
    when_imported(module, lambda: seen.append(1))
    with pytest.raises(OSError, match="no luck"):
        importlib.import_module(module)
    assert seen == []
    assert module not in sys.modules


@pytest.mark.parametrize(
    "first",
    [
        "import hf_lowprec; hf_lowprec.LowPrecisionCallback",
        *(
            pytest.param(f"from hf_lowprec import {n}", marks=pytest.mark.every_case)
            for n in sorted({*hf_lowprec.__all__} - NEEDS_DEEPSPEED)
        ),
        pytest.param("import hf_lowprec.integrations.transformers.checkpoints.manifest", marks=pytest.mark.every_case),
    ],
)
def test_trainer_is_prepared_where_this_package_is_the_first_to_import_it(first):
    """Of its modules, one that is being imported when Trainer is may be needed for that."""
    code = f"import warnings; warnings.simplefilter('error', RuntimeWarning); {first}\n"
    code += "from transformers import Trainer; print(Trainer.__init__.__globals__['__name__'])"
    assert run_script("imported_anew.py", code) == "hf_lowprec.wrapped_method\n"
