"""What is read from metrics files and trainer states, also from damaged and resumed ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.metrics_file import METRICS_NAME
from hf_lowprec.tools.plotting.run_records import TRAINER_STATE, RunRecords, read_records
from hf_lowprec.tools.plotting.runs import Run, distinguishing_names, kinds_of_all, load_runs
from tests.support.training.metrics_file import run_record, step_records, write_metrics, write_records


def write_trainer_state(folder: Path, *history: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TRAINER_STATE
    path.write_text(json.dumps({"global_step": 3, "log_history": list(history)}))
    return path


def logged(path: Path) -> list[tuple[int, float]]:
    """Steps and losses."""
    return [(record["step"], record["loss"]) for record in read_records(path).steps]


def test_a_metrics_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_metrics(tmp_path, "kahan")
    found = read_records(tmp_path)
    assert found.source == tmp_path / METRICS_NAME
    assert {"record": "run", "version": 1, **found.run} == run_record("kahan")
    # Measured steps have all three; our generator leaves empty ones out.
    written = [{"worst": {}, "findings": [], **record} for record in step_records("kahan")]
    assert [{"record": "step", **record} for record in found.steps] == written
    assert found.notes == []
    assert read_records(tmp_path / METRICS_NAME) == found


def test_the_last_line_may_be_torn(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, "kahan", steps=60)
    whole = path.read_text()
    for length in (1, 10, 40):
        path.write_text(whole[:-length])
        found = read_records(tmp_path)
        # Without its line break alone, the line is complete.
        assert [record["step"] for record in found.steps] == ([20, 40, 60] if length == 1 else [20, 40])
        assert [("is unfinished" in note) for note in found.notes] == ([] if length == 1 else [True])


def test_a_file_that_the_reader_refuses_is_an_input_error(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, "kahan", steps=60)
    first, second, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, second, "<<<<<<< HEAD", *others]) + "\n")
    with pytest.raises(InputError, match=f"line 3 of {path} is not a record"):
        read_records(tmp_path)


def test_after_a_resume_the_later_part_wins(tmp_path: Path) -> None:
    def part(steps: range, loss: float) -> list[dict[str, Any]]:
        return [run_record("kahan"), *({"record": "step", "step": step, "loss": loss} for step in steps)]

    path = tmp_path / METRICS_NAME
    write_records(path, [*part(range(10, 70, 10), 1.0), *part(range(35, 55, 10), 2.0), *part(range(50, 60, 5), 3.0)])
    assert logged(path) == [(10, 1.0), (20, 1.0), (30, 1.0), (35, 2.0), (45, 2.0), (50, 3.0), (55, 3.0)]


def test_evaluations_are_part_of_their_steps_record(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    logs = [{"record": "step", "step": 4, "loss": 2.0}, {"record": "step", "step": 4, "eval_loss": 3.0}]
    write_records(path, [run_record("kahan"), *logs])
    assert read_records(path).steps == [{"step": 4, "loss": 2.0, "eval_loss": 3.0}]


def test_a_trainer_state_gives_the_same_records(tmp_path: Path) -> None:
    history = [
        {"step": 1, "epoch": 0.1, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-5, "lost_updates": 0.5},
        {"step": 2, "epoch": 0.2, "loss": 1.5, "norms_never_moved": 1.0, "lost_weight_decay": 0.25},
        {"step": 2, "epoch": 0.2, "eval_loss": 1.75, "eval_runtime": 3.0},
        {"step": 3, "epoch": 0.3, "train_runtime": 10.0, "train_loss": 1.7},
    ]
    write_trainer_state(tmp_path, *history)
    expected = [
        {key: history[0][key] for key in ("step", "epoch", "loss", "grad_norm", "learning_rate")},
        {"step": 2, "epoch": 0.2, "loss": 1.5, "eval_loss": 1.75},
    ]
    expected[0]["precision"] = {"all": {"lost_updates": 0.5}}
    expected[1]["precision"] = {"norms": {"never_moved": 1.0}, "all": {"lost_weight_decay": 0.25}}
    assert read_records(tmp_path).steps == expected


def test_of_trainer_states_the_one_that_went_further_is_read(tmp_path: Path) -> None:
    for step in (9, 10):
        write_trainer_state(tmp_path / f"checkpoint-{step}", {"step": step, "loss": 1.0})
    assert read_records(tmp_path).source == tmp_path / "checkpoint-10" / TRAINER_STATE
    write_trainer_state(tmp_path, {"step": 8, "loss": 1.0})  # by an earlier, shorter run
    assert read_records(tmp_path).source == tmp_path / "checkpoint-10" / TRAINER_STATE
    write_trainer_state(tmp_path, {"step": 12, "loss": 1.0})
    assert read_records(tmp_path).source == tmp_path / TRAINER_STATE
    write_metrics(tmp_path / "checkpoint-10", steps=40)
    assert read_records(tmp_path).source == tmp_path / "checkpoint-10" / METRICS_NAME
    write_metrics(tmp_path, steps=20)
    assert read_records(tmp_path).source == tmp_path / METRICS_NAME


def test_errors_name_the_path_and_the_way_out(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(InputError) as caught:
            read_records(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "there is no file or folder" in message(tmp_path / "gone")
    assert "name the output_dir of a training run" in message(tmp_path)
    write_trainer_state(tmp_path / "a" / "checkpoint-3", {"step": 3, "loss": 1.0})
    assert message(tmp_path).endswith(f", such as {tmp_path / 'a'}")
    write_records(tmp_path / METRICS_NAME, [run_record("kahan")])
    assert "contains no logged step" in message(tmp_path)
    torn = write_trainer_state(tmp_path / "b", {"step": 1, "loss": 1.0})
    torn.write_text(torn.read_text()[:-5])
    assert "is not complete JSON" in message(tmp_path / "b")
    for text in ("[]", "{}", '{"log_history": 3}'):
        torn.write_text(text)
        assert "it has no log_history" in message(tmp_path / "b")
    (tmp_path / "weights.safetensors").write_bytes(bytes(range(256)))
    assert "is not a record" in message(tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/out/run"], ["run"]),
        (["/out/a/run", "/out/b/run"], ["a", "b"]),
        (["/out/x/a/1", "/out/x/b/2"], ["a/1", "b/2"]),
        (["/out", "/out/checkpoint-5"], ["out", "out/checkpoint-5"]),
        (["/a/out", "/b/out", "/a/other"], ["a/out", "b/out", "a/other"]),
    ],
)
def test_names_are_what_distinguishes_the_paths(paths: list[str], names: list[str]) -> None:
    assert distinguishing_names([Path(path) for path in paths]) == names


def test_labels_and_paths_must_fit(tmp_path: Path) -> None:
    a, b = (write_metrics(tmp_path / name, steps=40).parent for name in "ab")
    assert [run.name for run in load_runs([a, b])] == ["a", "b"]
    assert [run.name for run in load_runs([a / METRICS_NAME, b / METRICS_NAME])] == ["a", "b"]
    assert [run.name for run in load_runs([b, a], ["x", "y"])] == ["x", "y"]
    for paths, labels, says in (
        ([a, b], ["x"], "1 label for 2 runs"),
        ([a, b], ["x", "x"], "'x' names two runs"),
        ([a, a / METRICS_NAME], [], "is the same run as"),
    ):
        with pytest.raises(InputError, match=says):
            load_runs(paths, labels)


def test_what_is_no_number_is_a_gap() -> None:
    values = [1.0, float("nan"), "2.0", None, True, 3, {}, float("inf"), -(10**400)]
    steps = [{"step": k, "loss": value} for k, value in enumerate(values)] + [{"step": 9}]
    run = Run("run", RunRecords(Path("file"), {}, steps, []))
    series = run.logged("loss")
    assert series.steps == list(range(9))
    assert [value for value in series.values if math.isfinite(value)] == [1.0, 3.0]
    assert series.last[0] == 3.0
    assert "The loss is not finite in 7 of 9 logs, first at step 1." in run.notes()
    assert not run.logged("grad_norm")


def test_malformed_precision_is_as_if_absent() -> None:
    precision = [3, {"all": 4}, {"all": {"lost_updates": "much"}}, {"norms": [], "new": {"never_moved": 0.5}}]
    steps: list[dict[str, Any]] = [{"step": k, "precision": value} for k, value in enumerate(precision)]
    steps.append({"step": 4, "worst": ["x"], "findings": "sentence"})
    run = Run("run", RunRecords(Path("file"), {"kinds": [], "report": 3}, steps, []))
    assert not run.measured("all", "lost_updates")
    assert run.measured("new", "never_moved").values == [0.5]
    assert run.kinds() == ["all", "norms", "new"] == kinds_of_all([run])
    assert (run.worst_tensors(), run.findings(), run.has_bf16_weights()) == ({}, [], False)


def test_sentences_that_differ_in_numbers_are_one_finding() -> None:
    def record(step: int, *findings: str) -> dict[str, Any]:
        return {"step": step, "findings": list(findings)}

    steps = [
        record(1, "Rounding lost 95.2% of the updates at 1e-06."),
        record(2, "layers.0.norm never moved.", "layers.1.norm never moved."),
        record(3, "Rounding lost 97% of the updates at 2e-06."),
    ]
    found = Run("run", RunRecords(Path("file"), {}, steps, [])).findings()
    assert [(f.message, f.first_step, f.last_step) for f in found] == [
        ("Rounding lost 97% of the updates at 2e-06.", 1, 3),
        ("layers.0.norm never moved.", 2, 2),
        ("layers.1.norm never moved.", 2, 2),
    ]


def test_a_run_without_precision_says_so(tmp_path: Path) -> None:
    write_trainer_state(tmp_path, {"step": 1, "loss": 1.0})
    (run,) = load_runs([tmp_path])
    assert run.kinds() == []
    assert any("Nothing was logged about precision" in note for note in run.notes())
