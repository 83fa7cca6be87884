"""`hf-lowprec doctor` reports a working machine as such, and finds each part that a test breaks on purpose."""

import platform
from importlib import metadata

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_lowprec import AdamW
from hf_lowprec.optim.backends.c import native
from tests.support.command_output import hf_lowprec
from tests.support.processes.ranks import run_ranks

TORCH = metadata.version("torch")
"""Without the name of the build, with which `torch.__version__` ends on Linux."""
CHECKS = ["versions", "packages", "names", "steps", "reduction", "training"]


def doctor() -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status, and status and text by check."""
    result = hf_lowprec("doctor")
    return result.exit_code, _findings(result.output)


def _findings(output: str) -> dict[str, tuple[str, str]]:
    rows = (line.split(maxsplit=2) for line in output.splitlines())
    return {row[1]: (row[0], row[2]) for row in rows if len(row) == 3 and row[1] in CHECKS}


@pytest.fixture
def compiled_anew(monkeypatch, tmp_path):
    """Compile steps again for this test, and again for the next ones."""
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path))
    native._load.cache_clear()
    yield
    native._load.cache_clear()


def test_all_is_well_here():
    status, found = doctor()
    assert list(found) == CHECKS
    assert {name: word for name, (word, _) in found.items()} == {
        **dict.fromkeys(CHECKS, "ok"),
        "reduction": "-",  # one process
    }
    assert status == 0
    assert f"Python {platform.python_version()}, torch {TORCH}, " in found["versions"][1]
    assert f", transformers {metadata.version('transformers')}, " in found["versions"][1]
    assert "cpu: backend 'native' gives the same bits as 'eager'" in found["steps"][1]
    assert "accelerate launch -m hf_lowprec doctor" in found["reduction"][1]


def test_one_process_with_several_gpus_is_told_how_to_train(monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    status, found = doctor()
    assert (status, found["training"][0]) == (0, "-")
    assert "CUDA_VISIBLE_DEVICES=0" in found["training"][1]


def test_an_old_package_is_named(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=99", "no-such-extra>=1; extra == 'demo'"])
    status, found = doctor()
    assert (status, found["packages"]) == (
        1,
        ("FAILED", f"torch {TORCH} is installed, but torch>=99 is required"),
    )
    assert found["training"][0] == "ok"  # the other checks go on


def test_a_name_that_leads_elsewhere_is_named(monkeypatch):
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda args: (torch.optim.SGD, {})))
    status, found = doctor()
    assert status == 1
    assert found["names"][0] == "FAILED"
    assert "optim='adafactor_bf16_kahan' selects <class 'torch.optim.sgd.SGD'>" in found["names"][1]


def test_a_step_that_rounds_otherwise_is_found(monkeypatch, compiled_anew):
    monkeypatch.setattr(
        native, "render", lambda layout, render=native.render: render(layout).replace("0x7fffu", "0x6fffu")
    )
    status, found = doctor()
    assert status == 1
    assert found["steps"] == (
        "FAILED",
        "cpu: backend 'native' with rounding='kahan' gives different bits from 'eager'",
    )


def test_without_a_compiler_all_works(monkeypatch, compiled_anew):
    monkeypatch.setenv("CC", "no-such-compiler")
    status, found = doctor()
    assert (status, found["steps"][0]) == (0, "-")
    assert "cpu uses the slower 'eager' backend" in found["steps"][1]
    assert "no-such-compiler" in found["steps"][1]
    assert found["training"][0] == "ok"


def test_a_training_that_stands_still_is_found(monkeypatch):
    monkeypatch.setattr(AdamW, "step", lambda self, closure=None: None)
    status, found = doctor()
    assert (status, found["training"][0]) == (1, "FAILED")
    assert "weights that did not change: ['model.embed_tokens.weight'" in found["training"][1]


@pytest.mark.distributed
def test_two_ranks_check_their_reduction():
    output = run_ranks("doctor_on_ranks.py", 2)
    found = _findings(output)
    assert {name: word for name, (word, _) in found.items()} == dict.fromkeys(CHECKS, "ok"), output
    assert found["reduction"][1] == "2 ranks over gloo: FP32 means of BF16 gradients, the same on all"
    assert output.count("12 steps") == 1  # one rank speaks


@pytest.mark.distributed
def test_a_reduction_in_bf16_is_found():
    output = run_ranks("doctor_on_ranks.py", 3, "broken", fails=True)
    assert _findings(output)["reduction"] == ("FAILED", "means over 3 ranks do not match an FP32 sum"), output


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("alone", "FAILED  training   RuntimeError: out of memory, says rank 1 (rank 1)"),
        ("differs", "FAILED  reduction  means over 2 ranks differ from rank to rank"),
    ],
)
def test_what_one_rank_finds_is_said(word, said):
    assert said in run_ranks("doctor_on_ranks.py", 2, word, fails=True)
