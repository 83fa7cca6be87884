"""Forks of one pre-training begin alike, and what they say is computed from their losses."""

import dataclasses
import math
import re

import pytest
import torch

pytest.importorskip("scipy")

from benchmarks.evidence import harness, page
from benchmarks.evidence.experiments import forks
from benchmarks.evidence.training.loop import Training
from hf_lowprec import fp32_state_dict

SETTINGS = dataclasses.replace(forks.HOUR, length=16, batch=2, first_steps=40, steps=20, tail=20, validation=2)
ROUNDED = {"nearest", "feedback", "feedback-int8", "sr"}


@pytest.fixture(scope="module")
def begun_and_record(tmp_path_factory):
    """Run the experiment; return what each fork started from (FP32 weights, stored weights, batches) and the record."""
    begun = {}

    class Observed(Training):
        def run(self, last, *args):
            batches = {}
            of_step = self.batches.of_step
            self.batches.of_step = lambda step: batches.setdefault(step, of_step(step))
            stored = {name: param.detach().clone() for name, param in self.model.named_parameters()}
            if self.mode.masters:
                exact = dict(zip(stored, (each.clone() for each in self.optimizer.masters), strict=True))
            elif self.mode.rounding:
                exact = {name: fp32_state_dict(self.model, self.optimizer)[name].clone() for name in stored}
            else:
                exact = stored
            begun[self.case] = exact, stored, batches
            return super().run(last, *args)

    experiment = dataclasses.replace(forks.EXPERIMENT, settings={"hour": SETTINGS})
    folder = tmp_path_factory.mktemp("forks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks, "Training", Observed)
        record = harness.run(experiment, "hour", None, folder)
    trunk = torch.load(folder / "checkpoints" / "forks-hour" / "trunk.pt")["model"]
    return begun, record, trunk


def test_forks_begin_with_the_weights_of_the_trunk(begun_and_record):
    begun, _, trunk = begun_and_record
    assert not torch.equal(begun["trunk"][0]["model.norm.weight"], trunk["model.norm.weight"])  # it was trained
    for way in SETTINGS.ways:
        exact, stored, _ = begun[way]
        for name, found in exact.items():
            if way == forks.PERTURBED:
                # Of a normal number's thousandths, the standard deviation is 5 errors of its estimate off at most.
                relative = found / trunk[name] - 1
                assert relative[trunk[name] != 0].std() == pytest.approx(1e-3, rel=5 / math.sqrt(2 * found.numel()))
                continue
            expected = trunk[name].to(stored[name].dtype).float() if way in ROUNDED else trunk[name]
            # The low bits of a weight halfway between two BF16 numbers end one unit of FP32 before it.
            units = (found.float().view(torch.int32) - expected.view(torch.int32)).abs().max()
            assert units <= way.startswith("split"), (way, name)
            assert torch.equal(stored[name], trunk[name].to(stored[name].dtype)), (way, name)
    assert (
        begun["nearest"][1]["model.norm.weight"].dtype
        == begun["split"][1]["model.embed_tokens.weight"].dtype
        == torch.bfloat16
    )


def test_forks_see_the_same_batches_and_none_of_the_trunk(begun_and_record):
    begun, record, _ = begun_and_record
    last = SETTINGS.first_steps + SETTINGS.steps
    assert list(begun["trunk"][2]) == list(range(SETTINGS.first_steps))
    expected = begun["autocast"][2]
    assert list(expected) == list(range(SETTINGS.first_steps, last))
    for way in SETTINGS.ways:
        assert expected.keys() == begun[way][2].keys()
        assert all(map(torch.equal, expected.values(), begun[way][2].values()))
    assert len({tokens.numpy().tobytes() for _, _, batches in begun.values() for tokens in batches.values()}) == last
    assert len({case["text"] for case in record["cases"].values()}) == 1


def test_the_page_has_each_way_with_its_prediction(begun_and_record):
    _, record, _ = begun_and_record
    exact, split = (record["cases"][way]["tail"] for way in ("autocast", "split"))
    assert len(exact) == SETTINGS.tail and exact != split
    mean = sum(one - other for one, other in zip(split, exact, strict=True)) / SETTINGS.tail
    found = page.section(forks.EXPERIMENT, record)
    shown = f"{mean:+.4f}".replace("-0.0000", "+0.0000")
    assert re.search(rf"\| split: within 0\.002 of autocast \| [^|]+ \| {re.escape(shown)} ± 0\.0", found)
    assert "more than 0.02 above autocast" in found
    for way in SETTINGS.ways[1:]:
        assert f"| {forks.LABELS[way]} | " in found


@pytest.mark.parametrize(("shift", "expected"), [(0.0, "no"), (0.0195, "undecided"), (0.03, "yes")])
def test_verdicts_on_nearest(shift, expected):
    """Of ten blocks, every second one is a thousandth further off: 0.0005 on average, with an interval of 0.0004."""
    losses = {"autocast": [2.0] * 100, "nearest": [2.0 + shift + 1e-3 * (k % 20 < 10) for k in range(100)]}
    cases = {way: {"tail": tail, "points": [{"loss": [2.0]}], "parameters": 1} for way, tail in losses.items()}
    (row,) = forks.section({"settings": dataclasses.asdict(forks.HOUR), "cases": cases}).rows
    assert row.verdict == expected
