"""`hf-lowprec plot` on runs of a real Trainer, and what it says about input that it cannot draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_output import hf_lowprec, refused

pytest.importorskip("matplotlib")

from matplotlib.lines import Line2D

from hf_lowprec.tools.plotting import draw, read_log
from tests.support.training.tiny_trainer import trained

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_state(folder: Path, *history: Any) -> Path:
    """The folder, with a Trainer's state that has logged `history`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.get_xydata()]


def drawn(**runs: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
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
            "Lost updates": {"all weights": logged("lost_updates")},
            "Learning rate": {"learning rate": logged("learning_rate")},
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
        "Loss": {"training": [(1, 2.0)], "evaluation": [(1, 3.0)]},
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
