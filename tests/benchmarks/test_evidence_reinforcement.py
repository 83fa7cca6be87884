"""The reinforcement learning of the evidence: its reward, its modes, its arithmetic, and that seeds fix it."""

import dataclasses

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("trl")
pytest.importorskip("datasets")

import hf_lowprec
from benchmarks.evidence import harness, page
from benchmarks.evidence.experiments import reinforcement
from benchmarks.evidence.training import sums

SETTINGS = reinforcement.Settings(
    seeds=1,
    rates=(1e-3,),
    steps=2,
    records=(1, 2),
    first_steps=100,
    completions=64,
    group=8,
    stale=2,
    width=64,
    layers=1,
)
BF16, FP32 = torch.bfloat16, torch.float32
MODES = {
    "fp32": (torch.optim.AdamW, None, FP32, FP32),
    "autocast": (torch.optim.AdamW, None, FP32, FP32),
    "nearest": (torch.optim.AdamW, None, BF16, BF16),
    "sr": (hf_lowprec.AdamW, "stochastic", BF16, FP32),
    "kahan": (hf_lowprec.AdamW, "kahan", BF16, FP32),
    "split": (hf_lowprec.AdamW, "split", BF16, FP32),
}
"""Class and rounding of the optimizer, dtypes of matrices and norms."""


def test_only_the_sum_in_two_digits_is_rewarded():
    rows = {row["prompt"]: row["answer"] for row in sums.sums()}
    assert len(rows) == 100
    assert (rows["3 + 4"], rows["9 + 9"], rows["0 + 0"]) == ("0 7", "1 8", "0 0")
    texts = ["0 7", "1 7", "7", "0 7 0", ""]
    assert sums.reward(texts, ["0 7"] * len(texts), prompts=None) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_policy_that_is_certain_of_the_answer_has_no_loss():
    """A stand-in for the model gives each next token a logit of 9 more than the other 13: log(1 + 13·e^-9) a token."""
    right = sums.tokens()

    class Certain(torch.nn.Module):
        def forward(self, input_ids):
            logits = 9.0 * torch.nn.functional.one_hot(right[:, 1:], len(sums.WORDS))
            return type("Output", (), {"logits": logits})

    expected = 3 * torch.log1p(13 * torch.exp(torch.tensor(-9.0)))
    torch.testing.assert_close(sums.answer_losses(Certain(), right), expected.expand(100), rtol=1e-3, atol=0.0)
    assert sums.tokenizer().decode(right[34], skip_special_tokens=True) == "3 + 4 0 7"


@pytest.mark.every_case  # TRL takes seconds to import
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_has_the_optimizer_and_dtypes_that_it_says(mode):
    cls, rounding, matrices, norms = MODES[mode]
    trainer, _ = reinforcement.trainer(f"{mode} 0.001", SETTINGS, sums.llama(32, 1), seed=0)
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, cls)
    assert optimizer.param_groups[0].get("rounding") == rounding
    assert optimizer.param_groups[0]["weight_decay"] == 0
    assert trainer.model.lm_head.weight.dtype == matrices
    assert trainer.model.model.norm.weight.dtype == norms
    assert (trainer.accelerator.mixed_precision == "bf16") == (mode == "autocast")


@pytest.mark.every_case
def test_seeds_fix_the_record_and_the_page_is_made_of_it(tmp_path, monkeypatch):
    modes = {mode: reinforcement.ARGUMENTS[mode] for mode in ("fp32", "nearest", "sr")}  # the others take time
    monkeypatch.setattr(reinforcement, "ARGUMENTS", modes)
    settings = dataclasses.replace(SETTINGS, seeds=2)
    experiment = dataclasses.replace(reinforcement.EXPERIMENT, settings={"hour": settings})
    found = harness.run(experiment, "hour", None, tmp_path / "a")
    assert set(found["cases"]) == set(reinforcement.cases(settings))
    again = harness.run(experiment, "hour", ["sr 0.001", "nearest 0.0003 stale"], tmp_path / "b")["cases"]
    compared = {"fp32 0.001", "fp32 0.0003 stale"}
    assert set(again) == {reinforcement.START, "sr 0.001", "nearest 0.0003 stale"} | compared
    assert all(result.get("points") == found["cases"][case].get("points") for case, result in again.items())
    for points in found["cases"]["sr 0.001"]["points"]:
        assert len({point["reward"] for point in points}) == len(points), "nothing was learned"
    rows = experiment.section(found).rows
    assert len(rows) == len(modes) - 1 + 1  # modes, the probe
    assert "| stochastic |" in page.section(experiment, found)
