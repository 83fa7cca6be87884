"""`hf-lowprec inspect` prints tables and findings, or JSON, and exits with 1 if something is wrong."""

import json
import math
import shutil

import pytest
import torch

from hf_lowprec.integrations.transformers.checkpoints.manifest import MANIFEST_NAME
from tests.support.command_output import hf_lowprec, refused
from tests.support.training.tiny_trainer import llama, trained


def run(*words, columns=80):
    return hf_lowprec("inspect", *words, columns=columns)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of torch's AdamW in BF16, and a healthy one, each with its start."""
    folder = tmp_path_factory.mktemp("runs")
    for optim, model in (("adamw_torch", llama().to(torch.bfloat16)), ("adamw_bf16_kahan", llama())):
        model.save_pretrained(folder / optim / "start")
        saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 6}
        trained(folder / optim, model=model, optim=optim, learning_rate=1e-6, weight_decay=0.1, **saving)
    return folder


@pytest.mark.parametrize("width", [80, 120])
def test_one_checkpoint(runs, width):
    result = run(runs / "adamw_torch/checkpoint-6", columns=width)
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert max(len(line) for line in lines if str(runs) not in line) <= width
    (mlp,) = (line.split() for line in lines if line.split()[:1] == ["mlp"])
    assert mlp[:4] == ["mlp", "bfloat16", "6", f"{2 * 3 * 32 * 64:,}"]
    (norms,) = (line.split() for line in lines if line.split()[:2] == ["norms", "bfloat16"])
    assert norms[2:] == ["5", "160", "0.00", "160", "0", "100.0%"]
    text = " ".join(result.output.split())
    assert "Norms at the initial value (all 1.0 or all 0.0): 5 of 5" in text and "no compensation" in text
    assert text.count("Param group of torch.optim") == 2
    assert "4 findings: 1. Norms do not move: 5 norms stayed at the initial value" in text
    for remedy in ("whose norms stay in FP32", 'state_rounding="stochastic"', 'optim="adamw_bf16_split"'):
        assert remedy in text


def test_two_checkpoints(runs):
    folder = runs / "adamw_bf16_kahan"
    result = run(folder / "start", folder / "checkpoint-6")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "6 steps between the two" in text and "Nothing wrong was found." in text
    assert "compared after rounding to bfloat16" in text
    assert run(runs / "adamw_torch/start", runs / "adamw_torch/checkpoint-6").exit_code == 1


def test_equal_param_groups_are_told_once(tmp_path):
    """Trainer divides the parameters even if none of them is decayed."""
    trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1, save_strategy="steps", save_steps=1)
    assert run(tmp_path / "checkpoint-1").output.count("Param group of") == 1


def test_the_size_of_an_update(runs):
    result = run(runs / "adamw_bf16_kahan/start", "--update", 1e-9)
    assert result.exit_code == 0 and "lost at" in result.output and "1e-09" in result.output


def test_json(runs):
    result = run(runs / "adamw_torch/start", runs / "adamw_torch/checkpoint-6", "--json")
    assert result.exit_code == 1
    content = json.loads(result.stdout, parse_constant=pytest.fail)
    assert content.keys() == {"version", "checkpoints", "comparison", "findings"}
    start, end = content["checkpoints"]
    assert (start["step"], end["step"], len(end["tensors"]), start["optimizer"]) == (None, 6, 21, {})
    norm = end["tensors"]["model.norm.weight"]
    assert norm["part"] == "norms" and norm["ones"] == 32 and norm["constant"] == 1.0 and norm["at_initial_value"]
    assert end["optimizer"]["model.norm.weight"]["rounding"] == "nearest"
    assert content["comparison"]["tensors"]["model.norm.weight"]["moved"] == 0
    assert content["comparison"]["steps"] == 6
    names = {finding["code"]: finding["tensors"] for finding in content["findings"]}
    assert len(names["norms_never_moved"]) == 5


def test_json_has_no_nan(tmp_path):
    model = llama()
    model.lm_head.weight.data[0] = math.nan
    model.save_pretrained(tmp_path)
    result = run(tmp_path, "--json")
    content = json.loads(result.stdout, parse_constant=pytest.fail)
    assert content["checkpoints"][0]["tensors"]["lm_head.weight"]["nonfinite"] == 32
    assert "rms" not in content["checkpoints"][0]["tensors"]["lm_head.weight"]
    assert [finding["code"] for finding in content["findings"]] == ["not_finite"] and result.exit_code == 1


def test_plot(runs, tmp_path):
    pytest.importorskip("matplotlib")
    start, end = runs / "adamw_bf16_kahan/start", runs / "adamw_bf16_kahan/checkpoint-6"
    assert run(end, "--plot", tmp_path / "one.png", "--update", 1e30).exit_code == 0
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert run(start, end, "--plot", tmp_path / "two.svg").exit_code == 0
    drawn = (tmp_path / "two.svg").read_text()
    for text in ("attention", "norms", "share of these that moved", str(start), str(end), "updates of 1e-06"):
        assert f"<!-- {text}" in drawn or text in drawn, text
    assert "cannot be written" in refused("inspect", start, "--plot", tmp_path / "one.xyz")


def test_a_damaged_optimizer_state_is_not_passed_over(runs, tmp_path):
    folder = tmp_path / "checkpoint-6"
    shutil.copytree(runs / "adamw_bf16_kahan/checkpoint-6", folder)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:3000])
    result = run(folder)
    text = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "cannot be read" in text and "optimizer.pt has 3000 bytes instead of" in text
    assert json.loads(run(folder, "--json").output)["findings"][0]["code"] == "damaged"
    (folder / MANIFEST_NAME).unlink()
    assert "Nothing wrong was found in what could be read." in " ".join(run(folder).output.split())


def test_errors_are_messages(tmp_path):
    for words, said in (
        ((tmp_path / "nothing",), "there is no file or folder"),
        (("some-owner/no-such-model",), "cannot be fetched from the Hub"),
        ((tmp_path,), "has no weights that can be read"),
    ):
        assert said in refused("inspect", *words)
