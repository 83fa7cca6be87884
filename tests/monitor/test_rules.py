"""One table of faults: the monitor and `inspect` have the same codes, and the documentation lists them."""

import ast
import json
import re
from pathlib import Path

import pytest

import hf_lowprec
from hf_lowprec.monitor.rules import FAULTS
from tests.support.command_output import hf_lowprec as run
from tests.support.training.tiny_trainer import llama, trained

ROOT = Path(__file__).resolve().parents[2]
MODULES = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "hf_lowprec").rglob("*.py")]


def test_every_code_is_in_the_table_and_none_is_left_over():
    calls = [node for tree in MODULES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    functions = [ast.unparse(call.func) for call in calls]
    reports = [call for call, name in zip(calls, functions, strict=True) if name == "report"]
    given = [call.args[0].value for call in reports if isinstance(call.args[0], ast.Constant)]
    assert functions.count("Finding") == 1  # in `report`, which looks codes up
    assert len(given) > 15 and {*given} == {*FAULTS}


def test_every_code_is_documented_in_its_words():
    table = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8").partition("| code | what is wrong |")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", table.partition("\n\n")[0], flags=re.MULTILINE)
    assert rows == [(code, fault.what) for code, fault in FAULTS.items()]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bf16_kahan"])
def test_the_monitor_and_inspect_agree(tmp_path, caplog, optim):
    """On a run that rounds to nearest, during it and after it."""
    is_ours = optim == "adamw_bf16_kahan"
    settings = {"learning_rate": 1e-6, "weight_decay": 0.1, "logging_steps": 1, "max_steps": 6}
    settings |= {"save_strategy": "steps", "save_steps": 6, "lr_scheduler_type": "constant"}
    if is_ours:
        settings["optim_args"] = "rounding=nearest,state_rounding=nearest"
    model = llama() if is_ours else llama().bfloat16()
    callbacks = [hf_lowprec.LowPrecisionCallback(report=False)] if is_ours else []
    trained(tmp_path, model=model, optim=optim, callbacks=callbacks, **settings)
    warned = " ".join(record.getMessage() for record in caplog.records)
    measured = {code for code, fault in FAULTS.items() if f"hf_lowprec: {fault.what}: " in warned}
    result = run("inspect", tmp_path / "checkpoint-6", "--json")
    inspected = {finding["code"] for finding in json.loads(result.stdout)["findings"]}
    both = {"updates_lost", "second_moment_frozen"}
    assert measured == (both if is_ours else {"updates_lost"})
    assert inspected == both | (set() if is_ours else {"weight_decay_lost", "norms_never_moved"})
