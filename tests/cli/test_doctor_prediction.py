"""`hf-lowprec doctor MODEL`: what it prints, its advice, its exit status."""

import pytest
import torch
from safetensors.torch import save_file

from tests.support.command_output import hf_lowprec, refused
from tests.support.training.tiny_trainer import llama

FINE_TUNING = ("--lr", 2e-5, "--steps", 1000)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    return folder


def rows(result) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line.strip()}


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ([], 1),
        (["--optim", "adamw_bf16_split"], 0),
        (["--optim", "adamw_bf16_kahan"], 0),
        (["--optim", "adamw_bf16_sr"], 0),
        (["--optim", "adamw_bf16_sr", "--lr", 1e-7], 0),
        (["--optim", "adamw_bf16_sr", "--lr", 1e-8], 1),  # noise
        (["--optim", "lion_bf16_sr", "--lr", 1e-8], 1),  # without error feedback
    ],
)
def test_the_optimizer_decides_the_exit_status(model, options, status):
    assert hf_lowprec("doctor", model, *FINE_TUNING, *options).exit_code == status


@pytest.mark.parametrize(
    ("lr", "advice"),
    [
        (1e-6, 'Use optim="lion_bf16_split": it stores the FP32 weights'),
        (1e-2, 'Use optim="lion_bf16_split", which loses no update, or "lion_bf16_sr",\nwhich takes 2 bytes less'),
        (1e-11, "Raise the learning rate"),
    ],
)
def test_advice_comes_first_and_then_one_row_for_each_mode(model, lr, advice):
    result = hf_lowprec("doctor", model, "--lr", lr, "--steps", 1000, "--optim", "lion_bf16_sr")
    assert result.output.startswith(advice)
    found = rows(result)
    lost = {mode: float(found[mode][0].rstrip("%")) for mode in ("nearest", "stochastic", "split")}
    assert lost["stochastic"] == 0 and (lost["nearest"] > 50) == (lr < 1e-2) and (lost["split"] > 50) == (lr < 1e-10)
    assert "-0.0%" not in result.output and max(map(len, result.output.splitlines())) <= 80


def test_large_weights_lose_more_and_norms_and_integers_do_not_count(tmp_path):
    lost = []
    for scale in (1, 4):
        weights = {"up_proj.weight": torch.full((8, 8), 0.3 * scale), "positions": torch.arange(8)}
        save_file(weights | {"norm.weight": torch.ones(1000)}, tmp_path / "model.safetensors")
        lost.append(float(rows(hf_lowprec("doctor", tmp_path, "--lr", 2e-3, "--steps", 200))["nearest"][0].rstrip("%")))
    assert lost[0] < 60 < lost[1] < 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "--steps", 10], "with MODEL, --lr must be given"),
        (["MODEL", "--lr", 1e-3], "with MODEL, --steps must be given"),
        (["--lr", 1e-3], "it is for predictions, which need a MODEL"),
        (["./nothing", *FINE_TUNING], "MODEL: there is no file or folder './nothing'"),
        (["nobody/nothing", *FINE_TUNING], "there is no folder 'nobody/nothing'"),
        (["MODEL", *FINE_TUNING, "--optim", "sgd_bf16_sr"], "the size of its updates cannot be predicted"),
    ],
)
def test_misuse_is_told_in_a_line(model, words, message):
    assert message in refused("doctor", *(model if word == "MODEL" else word for word in words))


def test_a_folder_without_weights(tmp_path):
    assert "has no weights that can be read" in refused("doctor", tmp_path, *FINE_TUNING)
    save_file({"lm_head.weight": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "no floating-point weights" in refused("doctor", tmp_path, *FINE_TUNING)
