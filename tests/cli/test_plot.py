"""`hf-lowprec plot` on runs of a real Trainer, and what it says about input that it cannot draw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import Result

from hf_lowprec.tools.cli import plot as plot_command
from tests.support.command_output import hf_lowprec, refused

pytest.importorskip("matplotlib")

from tests.support.training.metrics_file import run_record, write_metrics, write_records
from tests.support.training.tiny_trainer import trained

ROOT = Path(__file__).resolve().parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(*words: object) -> Result:
    return hf_lowprec("plot", *words)


@pytest.fixture(scope="module")
def trainer_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of Trainer: in FP32, and in BF16 with our optimizer."""
    folder = tmp_path_factory.mktemp("runs")
    saving = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 1, "max_steps": 4}
    trained(folder / "fp32", optim="adamw_torch", eval_strategy="steps", eval_steps=2, **saving)
    trained(folder / "bf16", optim="adamw_bf16_kahan", **saving)
    return folder


def test_runs_of_trainer_are_drawn_side_by_side(
    trainer_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(trainer_runs / "fp32", trainer_runs / "bf16")
    assert result.exit_code == 0, result.output
    assert "fp32: 4 steps" in result.output and "bf16: 4 steps" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf_lowprec_plot.html", "hf_lowprec_plot.png"]
    assert (tmp_path / "hf_lowprec_plot.png").read_bytes().startswith(PNG_SIGNATURE)
    page = (tmp_path / "hf_lowprec_plot.html").read_text(encoding="utf-8")
    for name in ("fp32", "bf16"):
        state = json.loads((trainer_runs / name / "checkpoint-4" / "trainer_state.json").read_text())
        (loss,) = (entry["loss"] for entry in state["log_history"] if entry["step"] == 4 and "loss" in entry)
        assert f">{loss:.4g}</td>" in page
    assert "Lost updates" in page and "evaluation loss" in page


def test_one_run_is_drawn_into_its_folder(tmp_path: Path) -> None:
    write_metrics(tmp_path / "one", "kahan", steps=60, kinds=())
    for path in (tmp_path / "one", tmp_path / "one" / "hf_lowprec_metrics.jsonl"):
        result = run(path)
        assert result.exit_code == 0, result.output
        for suffix in (".html", ".png"):
            file = tmp_path / "one" / f"hf_lowprec_plot{suffix}"
            assert str(file) in result.output.replace("\n", "")
            file.unlink()


def test_out_names_the_files_and_label_the_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_metrics(tmp_path / name, "nearest", steps=60, kinds=())
    out = [tmp_path / "new" / name for name in ("plot.svg", "plot.html")]
    result = run(tmp_path / "a", tmp_path / "b", "--out", out[0], "--out", out[1], "--label", "first", "--label", "2nd")
    assert result.exit_code == 0, result.output
    assert [sorted((tmp_path / "new").iterdir())] == [sorted(out)]
    assert ">2nd</span>" in out[1].read_text(encoding="utf-8")
    assert "first: 60 steps" in result.output
    assert "step 60: Rounding lost" in result.output  # findings are printed, too


def test_misuse_is_a_message(tmp_path: Path) -> None:
    good = write_metrics(tmp_path / "good", steps=40, kinds=()).parent
    write_records(write_metrics(tmp_path / "empty", steps=40, kinds=()), [run_record("kahan")])
    (tmp_path / "file").write_text("")
    for words, says in (
        ([tmp_path / "gone"], "there is no file or folder"),
        ([tmp_path / "empty"], "contains no logged step"),
        ([tmp_path], "name the output_dir of a training run, such as"),
        ([good, "--out", "plot.pdf"], "plot.pdf must end in one of .html, .png, .svg"),
        ([good, "--out", "plot"], "plot must end in one of .html, .png, .svg"),
        ([good, "--out", tmp_path / "file" / "plot.png"], "name another file with --out"),
        ([good, "--label", "a", "--label", "b"], "2 labels for 1 run: give --label once per run"),
        ([good, good], "is the same run as"),
        ([], "Missing argument"),
    ):
        assert says in refused("plot", *words), words


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot_command, "find_spec", lambda name: None)
    result = run(write_metrics(tmp_path, steps=40, kinds=()))
    assert result.exit_code == 1
    assert "needs matplotlib: pip install 'hf-lowprec[plot]'" in result.output


def test_plotting_needs_no_torch(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path, steps=40, kinds=())
    code = f"""
import sys
from pathlib import Path
from hf_lowprec.tools.cli.plot import write_plot
from hf_lowprec.tools.plotting.runs import load_runs
write_plot(load_runs([Path({str(metrics)!r})]), Path({str(tmp_path / "plot.html")!r}))
assert not {{"torch", "transformers", "matplotlib.pyplot"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "plot.html").exists()


def test_the_plot_option_of_other_commands_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["inspect", "model"]
    monkeypatch.setattr(plot_command, "find_spec", lambda name: None)
    assert "'--plot': it needs matplotlib: pip install 'hf-lowprec[plot]'" in refused(*command, "--plot", "out.png")
    assert "matplotlib" not in hf_lowprec(*command).output
