"""`hf-lowprec inspect` prints a table and findings, or JSON, and exits with 1 if something is wrong."""

import json

import pytest
import torch

from tests.support.command_output import hf_lowprec, refused
from tests.support.training.tiny_trainer import llama, trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of torch's AdamW in BF16, and a healthy one, each with its start."""
    folder = tmp_path_factory.mktemp("runs")
    for optim, model in (("adamw_torch", llama().to(torch.bfloat16)), ("adamw_bf16_kahan", llama())):
        model.save_pretrained(folder / optim / "start")
        saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 6}
        trained(folder / optim, model=model, optim=optim, learning_rate=1e-6, weight_decay=0.1, **saving)
    return folder


def test_one_checkpoint(runs):
    result = hf_lowprec("inspect", runs / "adamw_torch/checkpoint-6")
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80 and "lost at 1e-06" in lines[0] and "moved" not in lines[0]
    (norms,) = (line.split() for line in lines if line.split()[:1] == ["norms"])
    assert norms == ["norms", "bfloat16", "160", "100.0%"]
    text = " ".join(result.output.split())
    assert sum(line.startswith("- ") for line in lines) == 4
    for remedy in ("whose norms stay in FP32", 'state_rounding="stochastic"', 'optim="adamw_bf16_split"'):
        assert remedy in text


def test_two_checkpoints(runs):
    folder = runs / "adamw_bf16_kahan"
    result = hf_lowprec("inspect", folder / "start", folder / "checkpoint-6")
    assert result.exit_code == 0, result.output
    assert "Nothing wrong was found." in result.output and max(map(len, result.output.splitlines())) <= 80
    (norms,) = (line.split() for line in result.output.splitlines() if line.split()[:1] == ["norms"])
    assert norms[1:4] == ["float32", "160", "0.0%"] and float(norms[4].rstrip("%")) > 50 and norms[5][-4:] == "e-06"
    assert hf_lowprec("inspect", runs / "adamw_torch/start", runs / "adamw_torch/checkpoint-6").exit_code == 1


def test_json_with_a_given_learning_rate(runs):
    result = hf_lowprec("inspect", runs / "adamw_torch/checkpoint-6", "--lr", 1, "--json")
    content = json.loads(result.stdout, parse_constant=pytest.fail)
    assert result.exit_code == 1 and content["rate"] == 1
    assert {row["part"]: row["lost"] for row in content["parts"]}["norms"] == 0
    assert [finding["code"] for finding in content["findings"]] == ["norms_never_moved", "second_moment_frozen"]


def test_what_cannot_be_read(tmp_path, runs):
    for words, said in (
        ((tmp_path / "nothing",), "there is no file or folder"),
        (("some-owner/no-such-model",), "cannot be fetched from the Hub"),
        ((tmp_path,), "has no weights that can be read"),
        ((runs / "adamw_torch/start", tmp_path), "LATER"),
    ):
        assert said in refused("inspect", *words)
