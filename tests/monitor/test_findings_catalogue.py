"""One catalogue: the monitor, `inspect` and `doctor` have the same codes, and the documentation lists them."""

import ast
import json
import re
from pathlib import Path

import pytest

import hf_lowprec
from hf_lowprec.monitor.findings_catalogue import FAULTS
from tests.support.command_output import hf_lowprec as run
from tests.support.training.tiny_trainer import llama, trained

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = ROOT / "hf_lowprec" / "diagnostics" / "finding.py"
MODULES = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "hf_lowprec").rglob("*.py") if path != CATALOGUE]


def test_every_code_is_in_the_catalogue_and_none_is_left_over():
    calls = [node for tree in MODULES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if ast.unparse(call.func) == "Finding"]  # Finding.of looks codes up
    makers = [call for call in calls if ast.unparse(call.func) in ("Finding.of", "finding")]
    given = {call.args[0].value for call in makers if isinstance(call.args[0], ast.Constant)}
    constants = {node.value for tree in MODULES for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert len(makers) > 20 and given <= {*FAULTS} <= constants


def test_every_code_is_documented_in_its_words():
    table = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8").partition("| code | what is wrong |")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", table.partition("\n\n")[0], flags=re.MULTILINE)
    assert rows == [(code, fault.what) for code, fault in FAULTS.items()]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bf16_kahan"])
def test_the_monitor_inspect_and_doctor_agree(tmp_path, caplog, optim):
    """On a run that rounds to nearest, before it, during it and after it."""
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
    checkpoint, planned = tmp_path / "checkpoint-6", ("--lr", 1e-6, "--steps", 6, "--weight-decay", 0.1)
    inspected, foretold = (
        {finding["code"] for finding in json.loads(result.stdout)["findings"]}
        for result in (run("inspect", checkpoint, "--json"), run("doctor", checkpoint, *planned, "--json"))
    )
    both = {"updates_lost", "second_moment_frozen"}
    assert foretold == (both if is_ours else both | {"weight_decay_lost"})
    assert measured == (both if is_ours else {"updates_lost"})
    assert inspected == foretold | (set() if is_ours else {"norms_never_moved"})
