"""`hf-lowprec plot` on runs of a real Trainer, and what it says about input that it cannot draw."""

from __future__ import annotations

import json
from itertools import combinations
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_output import hf_lowprec, refused

pytest.importorskip("matplotlib")

from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from hf_lowprec.tools import plotting
from hf_lowprec.tools.plotting import draw, read_log
from tests.support.training.tiny_trainer import trained

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_state(folder: Path, *history: Any) -> Path:
    """The folder, with a Trainer's state that has logged `history`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


def points(line: Line2D) -> list[tuple[float, float | None]]:
    """The points of a line; None where it is broken."""
    return [(x, None if isnan(y) else y) for x, y in line.get_xydata()]


def drawn(**runs: Path) -> dict[str, dict[str, list[tuple[float, float | None]]]]:
    """By title of the panel and label of the line, the points that are drawn of runs."""
    return {
        ax.get_title("left").partition(":")[0]: {str(line.get_label()): points(line) for line in ax.lines}
        for ax in draw({name: read_log(path) for name, path in runs.items()}).axes
    }


def test_what_trainer_has_logged_is_drawn_into_the_runs_folder(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 1, "max_steps": 12}
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", eval_strategy="steps", eval_steps=2, **saving)
    history = trainer.state.log_history

    def logged(name: str) -> list[tuple[float, float]]:
        return [(entry["step"], entry[name]) for entry in history if name in entry]

    for run in (tmp_path, tmp_path / "checkpoint-12", tmp_path / "checkpoint-12" / "trainer_state.json"):
        assert drawn(run=run) == {
            "Loss": {"training": logged("loss"), "evaluation": logged("eval_loss")},
            "Lost updates": {},  # Kahan summation loses none, so there is a line of text
            "Learning rate": {"training": logged("learning_rate")},
        }
    result = hf_lowprec("plot", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "hf_lowprec_plot.png").read_bytes().startswith(PNG_SIGNATURE)


def test_a_part_of_the_model_counts_as_0_where_it_is_not_logged(tmp_path: Path) -> None:
    run = write_state(
        tmp_path,
        {"step": 1, "loss": 2.0, "lost_updates": 0.5, "lost_updates/mlp": 0.75},
        {"step": 1, "eval_loss": 3.0},
        {"step": 2, "loss": float("nan"), "lost_updates": 0.0},
        {"step": 2, "train_runtime": 10.0},
    )
    assert drawn(run=run) == {
        "Loss": {"training (NaN or infinite at\nstep 2)": [(1, 2.0), (2, None)], "evaluation": [(1, 3.0)]},
        "Lost updates": {"all weights": [(1, 0.5), (2, 0.0)], "mlp": [(1, 0.75), (2, 0.0)]},
    }


def test_runs_share_the_axes_under_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp32 = write_state(tmp_path / "$fp32$", {"step": 1, "loss": 1.0})
    bf16 = write_state(tmp_path / "bf16", {"step": 1, "loss": 2.0, "lost_updates": 0.5, "lost_updates/mlp": 0.75})
    assert drawn(a=fp32, b=bf16) == {
        "Loss": {"a: training": [(1, 1.0)], "b: training": [(1, 2.0)]},
        "Lost updates": {"b: all weights": [(1, 0.5)], "b: mlp": [(1, 0.75)]},
    }
    monkeypatch.chdir(tmp_path)
    for words, file in (([], "hf_lowprec_plot.png"), (["--out", "other.png"], "other.png")):
        result = hf_lowprec("plot", fp32, bf16, *words)
        assert result.exit_code == 0 and file in result.output
        assert Path(file).read_bytes().startswith(PNG_SIGNATURE)


def test_runs_are_named_without_the_folders_that_they_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(plotting, "draw", lambda logs: names.extend(logs) or draw(logs))
    run = write_state(tmp_path / "run", {"step": 1, "loss": 1.0})
    checkpoint = write_state(run / "checkpoint-1", {"step": 1, "loss": 1.0})
    other = write_state(tmp_path / "far" / "other", {"step": 1, "loss": 1.0})
    monkeypatch.chdir(run)
    for runs, named in (
        ([run], ["run"]),
        ([run, checkpoint], ["run", "run/checkpoint-1"]),
        ([Path(), other], ["run", "far/other"]),
        ([run / "trainer_state.json", other], ["run/trainer_state.json", "far/other"]),
    ):
        names.clear()
        assert hf_lowprec("plot", *runs, "--out", tmp_path / "out.png").exit_code == 0
        assert names == [str(Path(name)) for name in named]


def logs(steps: Any = range(10, 201, 10), **values: Any) -> list[dict[str, Any]]:
    """Logs of steps. A value is a number for all of them, or a number by step, where others have none."""
    return [
        {"step": step}
        | {
            name.replace("__", "/"): value.get(step) if isinstance(value, dict) else value
            for name, value in values.items()
            if not isinstance(value, dict) or step in value
        }
        for step in steps
    ]


class TestGaps:
    """A line is broken where values are missing, and its label says why."""

    @staticmethod
    def line(name: str, entries: list[dict[str, Any]]) -> tuple[str, list[float], Line2D]:
        """The label of a panel's first line, the steps before which the line is broken, and the line."""
        (ax,) = [ax for ax in draw({"run": entries}).axes if ax.get_title("left").startswith(name)]
        line = ax.lines[0]
        steps, values = line.get_data()
        before = [steps[i] for i in range(1, len(steps)) if isnan(values[i - 1]) and not isnan(values[i])]
        legend = ax.get_legend()
        shown = [text.get_text() for text in legend.get_texts()] if legend else [""]
        return shown[0].replace("\n", " "), before, line

    @pytest.mark.parametrize(
        ("steps", "label", "broken"),
        [
            ([*range(10, 101, 10)], "", []),
            ([1, *range(500, 5001, 500)], "", []),  # logging_first_step
            ([*range(10, 101, 10), *range(200, 1001, 100)], "", []),  # other logging_steps after a resume
            ([10, 20, 30, 30], "", []),  # evaluated again at the end
            ([0, 100, 100], "", []),
            ([10, 1000], "", []),
            ([5, 9, 15, 21, 26], "", []),  # epochs
            ([10, 20, 40, 50], "training (no logs between steps 20 and 40)", [40]),
            ([10, 20, 80, 90], "training (no logs between steps 20 and 80)", [80]),
            ([10, 20, 80, 90, 200, 210], "training (no logs between steps 20 and 200, 2 times)", [80, 200]),
            ([10, 20, 30, 40, 30, 40, 50], "training (resumed at step 30)", [30]),
            ([20, 10, 20, 10, 5], "training (resumed at 3 steps from 10 to 5)", [10, 10, 5]),
        ],
    )
    def test_steps_that_are_not_logged(self, steps: list[int], label: str, broken: list[int]) -> None:
        assert self.line("Loss", logs(steps, loss=2.0))[:2] == (label, broken)

    @pytest.mark.parametrize("invalid", [nan, inf, -inf, 10**400, 1.7e308])
    def test_values_that_are_not_finite(self, invalid: float) -> None:
        entries = logs([1, 2, 3, 4], loss={1: 2.0, 2: invalid, 3: 1.0, 4: invalid})
        assert self.line("Loss", entries)[:2] == ("training (NaN or infinite at 2 steps from 2 to 4)", [3])

    def test_a_number_that_logs_of_the_loss_lack(self) -> None:
        entries = logs([1, 2, 3], loss=2.0, lost_updates={1: 0.5, 3: 0.5})
        entries += [{"step": 3, "eval_loss": 2.0}, {"step": 3, "train_runtime": 1.0}]
        assert self.line("Lost", entries)[:2] == ("all weights (not logged at step 2)", [3])
        assert self.line("Loss", entries)[:2] == ("training", [])

    def test_a_point_between_gaps_has_a_marker(self) -> None:
        entries = logs(loss={step: 2.0 if step in (10, 50, 100, 110, 200) else nan for step in range(10, 201, 10)})
        line = self.line("Loss", entries)[2]
        assert [line.get_xdata()[i] for i in line.get_markevery()] == [10, 50, 200]


@pytest.mark.parametrize(
    ("runs", "texts"),
    [
        ({"a": logs(loss=2.0, lost_updates=-1e-6)}, ["Lost updates: none (below 0.5%) in all weights"]),
        ({"a": logs(loss=2.0, lost_updates=0.01)}, []),
        (
            {"$a$": logs(loss=2.0, lost_updates=0.0, lost_updates__mlp=0.001), "b": logs(loss=2.0)},
            ["Lost updates: none (below 0.5%) in $a$: all weights; $a$: mlp"],
        ),
        ({"a": logs(loss=nan, learning_rate=1.0)}, ["Loss: training (NaN or infinite at 20 steps from 10 to 200)"]),
        (
            {"a": logs([1], loss=0.0, lost_updates=0.0, learning_rate=0)},
            ["Loss: 0 in training", "Lost updates: none (below 0.5%) in all weights", "Learning rate: 0 in training"],
        ),
    ],
)
def test_a_panel_without_anything_to_see_is_a_line_of_text(runs: dict[str, Any], texts: list[str]) -> None:
    figure = draw(runs)
    without_axes = [ax for ax in figure.axes if not ax.axison]
    assert [ax.get_title("left").replace("\n", " ") for ax in without_axes] == texts
    assert not any(ax.lines for ax in without_axes)
    with_axes = [ax for ax in figure.axes if ax.axison]
    assert [ax.get_xlabel() for ax in with_axes] == ["", "step"][2 - len(with_axes) :]
    assert all(ax.xaxis.get_tick_params()["labelbottom"] for ax in with_axes[-1:])


PARTS = {f"lost_updates__{part}": 0.8 for part in ("attention", "embeddings", "head", "mlp")}
EDGES = {
    "a_run": {"run": logs(loss={10: 3.0, 200: 1.0}, lost_updates={10: 1.0, 200: 0.0}, learning_rate=1e-5)},
    "one_step": {"run": logs([1], loss=2.0, lost_updates=1.0, learning_rate=1e-5)},
    "shares_of_chance": {"run": logs([1, 2, 3], loss=2.0, lost_updates={1: -0.7, 2: 0.0, 3: 1.6})},
    "large_numbers": {"run": logs([10**7, 2 * 10**7], loss={10**7: 1e38, 2 * 10**7: -1e38}, learning_rate=1e-30)},
    "long_names": {
        "/mnt/experiments/2024-11/adamw_bf16_split-lr2e-5-bs128-warmup100-cosine-seed0/$x^$": logs(loss=2.0),
        "W" * 200: logs(loss=2.0, eval_loss=2.0, lost_updates=0.9, learning_rate=1e-5, **PARTS),
        "two words " * 20: logs([10, 20, 80, 90], loss={10: nan, 20: 1.0, 80: 1.0}, lost_updates=0.0),
    },
    "long_names_without_lost_updates": {"W" * 200: logs(loss=nan, lost_updates=0.0), "b" * 90: logs(lost_updates=0)},
    "many_runs": {f"run-{k}": logs(loss=2.0, eval_loss=2.0, lost_updates=k / 8, **PARTS) for k in range(9)},
}


@pytest.mark.parametrize("case", EDGES)
def test_nothing_is_cut_or_covered(case: str) -> None:
    """All text is within the figure, points with their markers within the axes, and nothing overlaps."""
    figure = draw(EDGES[case])
    figure.draw_without_rendering()
    boxes = []
    for ax in figure.axes:
        assert contains(figure.bbox, ax.get_tightbbox())
        texts = [text for text in ax.get_children() if isinstance(text, Text) and text.get_text()]
        extents = [artist.get_window_extent() for artist in [*texts, *filter(None, [ax.get_legend()])]]
        assert all(contains(figure.bbox, extent) for extent in extents)
        boxes += extents
        if ax.axison:
            boxes += [ax.bbox, ax.yaxis.get_offset_text().get_window_extent()]
        for line in ax.lines:
            radius = line.get_markersize() * figure.dpi / 72 / 2
            for x, y in ax.transData.transform([point for point in line.get_xydata() if not isnan(point[1])]):
                assert contains(ax.bbox, Bbox([[x - radius, y - radius], [x + radius, y + radius]]))
    assert [(a, b) for a, b in combinations(boxes, 2) if overlap(a, b)] == []


def contains(outer: Bbox, inner: Bbox) -> bool:
    return outer.x0 <= inner.x0 and outer.y0 <= inner.y0 and inner.x1 <= outer.x1 and inner.y1 <= outer.y1


def overlap(a: Bbox, b: Bbox) -> bool:
    """Whether two boxes share more than a pixel's width."""
    return min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1


def test_the_newest_checkpoint_is_read(tmp_path: Path) -> None:
    for step in (9, 10):
        write_state(tmp_path / f"checkpoint-{step}", {"step": step, "loss": 1.0})
    (tmp_path / "checkpoint-11").mkdir()  # not finished
    assert read_log(tmp_path) == [{"step": 10, "loss": 1.0}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "name the output_dir of a run that has saved a checkpoint"),
        ('{"log_history": [{"st', "trainer_state.json is not readable JSON"),
        ("[]", "trainer_state.json does not contain a JSON object"),
        ('{"log_history": 3}', "it has no log_history"),
        ('{"log_history": []}', "has no logged step"),
        ('{"log_history": [3, {"step": "1", "loss": 2.0}, {"step": 1, "loss": "2.0"}]}', "has no logged step"),
    ],
)
def test_a_run_that_cannot_be_drawn_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "trainer_state.json").write_text(text)
    assert says in refused("plot", tmp_path)


def test_paths_that_are_wrong_are_refused(tmp_path: Path) -> None:
    run = write_state(tmp_path / "run", {"step": 1, "loss": 1.0})
    assert "there is no file or folder" in refused("plot", tmp_path / "gone")
    for out in (tmp_path / "gone" / "plot.png", "plot.xyz"):
        assert "cannot be written" in refused("plot", run, "--out", out)
