"""The evidence: seeds that train together share nothing, interrupted runs go on, the page is that of the records."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")

from benchmarks.evidence import harness, page
from benchmarks.evidence.experiments import scale, steps
from benchmarks.evidence.statistics import exceeds, growth, paired, verdict
from benchmarks.evidence.training import text
from benchmarks.evidence.training.modes import MODES
from benchmarks.evidence.training.replicas import Replicas, Shape

SMALL = Shape(width=32, layers=1, length=8)
SETTINGS = steps.Settings(modes=("fp32", "sr", "split-int8"), steps=12, records=(4, 12), seeds=2, shape=SMALL)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Runs the experiment in a folder of that name; returns the record without times."""
    monkeypatch.setattr(harness, "CHECKPOINT_EVERY", 0)
    monkeypatch.setattr(text, "VALIDATION_SEQUENCES", 64)
    small = dataclasses.replace(steps.EXPERIMENT, settings={"hour": SETTINGS})

    def run(folder, *cases):
        found = harness.run(small, "night", [*cases] or None, tmp_path / folder)
        assert found == json.loads((tmp_path / folder / "steps-hour.json").read_text())
        for case in found["cases"].values():
            del case["seconds"]
        return found

    return run


def trained(name: str, seeds: list[int], other_data: bool = False) -> list[torch.Tensor]:
    model = Replicas(seeds, SMALL)
    optimizer = MODES[name].optimizer(model, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    sequences = text.Sequences(text.load(None), seeds, 2, SMALL.length)
    for step in range(3):
        tokens = sequences.of_step(step).clone()
        if other_data:
            tokens[1] = 65
        with MODES[name].precision():
            model.losses(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("name", MODES)
def test_seeds_that_train_together_share_nothing(name):
    one, other = trained(name, [3, 4]), trained(name, [3, 4], other_data=True)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


def test_a_seed_has_its_weights_and_data_whatever_the_others_are():
    alone, together = (Replicas(seeds, SMALL) for seeds in ([4], [3, 4]))
    for one, both in zip(alone.parameters(), together.parameters(), strict=True):
        assert torch.equal(one[0], both[1])
    data = text.load(None)
    one, both = (text.Sequences(data, seeds, 2, 8) for seeds in ([4], [3, 4]))
    for step in (0, 999, 1000, 5):
        assert torch.equal(one.of_step(step)[0], both.of_step(step)[1])
    assert Shape().parameters() == sum(param.numel() for param in Replicas([0], Shape()).parameters())


def test_an_interrupted_run_has_the_record_of_one_that_was_not(record, monkeypatch):
    whole = record("whole")
    assert set(whole["cases"]) == set(steps.cases(SETTINGS))
    assert set(whole["compared"]["distance"]) == set(whole["cases"]) - {"fp32", "fp32-cooldown"}
    save = harness.Workspace.save

    def interrupted(work, case, checkpoint):
        save(work, case, checkpoint)
        if checkpoint["step"] in (3, 10):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(harness.Workspace, "save", interrupted)
        for _ in range(2 * len(SETTINGS.modes)):
            with pytest.raises(KeyboardInterrupt):
                record("parts", *SETTINGS.modes)
    assert record("parts") == whole


def test_cases_are_run_again_only_for_their_checkpoints(record, tmp_path):
    first = record("a", "fp32", "sr")
    for path in tmp_path.glob("a/checkpoints/steps-hour/*"):
        path.unlink()
    again = record("a", "fp32", "sr")
    assert again == first
    checkpoints = tmp_path / "a" / "checkpoints" / "steps-hour"
    assert {path.name for path in checkpoints.iterdir()} == {"settings"}
    cooled = record("a", "sr-cooldown")
    assert cooled["cases"] == first["cases"] | {"sr-cooldown": cooled["cases"]["sr-cooldown"]}
    assert {path.name for path in checkpoints.glob("*.json")} == {"sr.json", "sr-cooldown.json"}


def test_patterns_choose_cases_and_those_they_are_compared_with():
    assert harness.chosen(["sr", "fp32", "fp32-cooldown", "split", "sr-cooldown"], ["s*-*"], steps.EXPERIMENT) == [
        "fp32",
        "fp32-cooldown",
        "sr-cooldown",
    ]


def test_a_case_of_one_size_is_compared_with_fp32_of_that_size():
    names = scale.cases(scale.HOUR)
    assert harness.chosen(names, ["sr 56x3"], scale.EXPERIMENT) == ["fp32 56x3", "sr 56x3"]


def test_a_record_of_another_device_is_left_alone(record, tmp_path):
    record("a", "sr")
    path = tmp_path / "a" / "steps-hour.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "device": "cuda"}))
    with pytest.raises(SystemExit, match=r"steps-hour.json was measured with --device cuda; name another --output"):
        record("a", "sr")


def test_one_process_at_a_time_has_a_case(tmp_path):
    """File locks exclude each other also within a process."""
    one, other = (harness.Workspace(tmp_path, print, None) for _ in range(2))
    assert one.claim("a") and not other.claim("a") and other.claim("b")
    one.release("a")
    assert other.claim("a")


def test_cases_of_another_text_are_not_mixed(record, monkeypatch):
    record("a", "sr")
    of_python = text.load(None)
    monkeypatch.setattr(text, "load", lambda folder: of_python._replace(checksum="another"))
    with pytest.raises(SystemExit, match="other cases were trained on another text"):
        record("a", "split-int8")


def test_a_mean_and_its_interval():
    """The example has the differences 1, 2, 3: mean 2, deviation 1, t(0.975; 2) = 4.3027 and t(0.9875; 2) = 6.2053."""
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], claims=2).half == pytest.approx(6.2053 / 3**0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.001, -0.001, 0.0], "equal"),
        ([0.001, 0.002, 0.0015], "equal, above zero"),
        ([-0.001, -0.002, -0.0015], "equal, below zero"),
        ([0.5, 0.51, 0.49], "worse"),
        ([-0.5, -0.51, -0.49], "better"),
        ([0.1, -0.1, 0.0], "undecided"),
        ([0.010, 0.012, 0.008], "above"),
        ([-0.010, -0.012, -0.008], "below"),
    ],
)
def test_verdicts(values, expected):
    assert verdict(paired(values, [0.0] * 3), 0.01) == expected


@pytest.mark.parametrize(
    ("means", "expected"), [((1, 1), "yes"), ((1, 0), "undecided"), ((1, -1), "no"), ((0, -1), "no")]
)
def test_all_means_are_above_zero_or_one_is_below_or_nobody_knows(means, expected):
    assert exceeds(paired([mean - 0.1, mean, mean + 0.1], [0.0] * 3) for mean in means) == expected


def test_growth_is_the_slope_for_each_tenfold():
    at = [10, 100, 1000]
    lines = np.array([[0.0, 2.0, 4.0], [1.0, 3.0, 5.0], [7.0, 9.0, 11.0]])
    found = growth(at, lines)
    assert (found.mean, found.half) == pytest.approx((2.0, 0.0), abs=1e-12)


def test_a_line_is_laid_through_sizes():
    """Differences that are 0.001 · log10 of the parameters, less 0.005."""
    settings = scale.Settings(modes=("fp32", "split"), models=((32, 3, 3), (56, 3, 3), (84, 3, 3)))
    cases = {}
    for name in scale.cases(settings):
        mode, size = name.split()
        parameters = settings.shape(*map(int, size.split("x"))).parameters()
        apart = 0.001 * math.log10(parameters) - 0.005 if mode == "split" else 0.0
        losses = [2.0 + apart + shift for shift in (-0.1, 0.0, 0.1)]
        cases[name] = {"parameters": parameters, "points": [{"loss": losses}]}
        cases[name]["batch"] = 1
    section = scale.section({"settings": dataclasses.asdict(settings), "cases": cases})
    rows = section.rows
    assert "Not run yet" not in section.text
    assert [row.verdict for row in rows[:2]] == ["equal at 3 of 3 sizes", "no"]
    assert rows[1].ours == "+0.0010 ± 0.0000"
    settings = dataclasses.replace(settings, models=(*settings.models, (136, 4, 3)))
    part_of = {"settings": dataclasses.asdict(settings)}
    part = scale.section({**part_of, "cases": cases})
    assert part.rows == rows and "Not run yet: 1.0 million parameters;" in part.text
    for mode in settings.modes:
        del cases[f"{mode} 56x3"]
    assert "Not run yet: 0.1, 1.0 million parameters;" in scale.section({**part_of, "cases": cases}).text


def test_the_page_is_that_of_the_records():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python -m benchmarks.evidence.page"
