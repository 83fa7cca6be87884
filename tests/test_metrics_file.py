"""The metrics file: what is written is read again, whatever killed the writer."""

import ast
import json
import math
import sys
from pathlib import Path

import pytest

import hf_lowprec.metrics_file
from hf_lowprec.metrics_file import (
    METRICS_NAME,
    MeasuredPrecision,
    MetricsWriter,
    RunPart,
    RunRecord,
    StepRecord,
    parts_until,
    read_metrics,
)

RUN = RunRecord(
    model="LlamaForCausalLM",
    optimizer="AdamW",
    optim="adamw_bf16_kahan",
    parameters=100,
    kinds={"attention": {"tensors": 1, "parameters": 100, "dtypes": {"bfloat16": 100}}},
    report="bfloat16 training\n  rounding: kahan, β₂ 0.999",
)
STEP = StepRecord(
    4,
    {"epoch": 0.5, "loss": 2.1, "learning_rate": 1e-5},
    MeasuredPrecision(
        {"all": {"lost_updates": 0.1 + 0.2}, "attention": {"lost_updates": -1e-9, "never_moved": 0.0}},
        {"lost_updates": [("layers.0.q_proj.weight", 0.99)]},
        ["attention loses 99%: use rounding=kahan"],
    ),
)
EVALUATION = StepRecord(4, {"epoch": 0.5, "eval_loss": 2.0})


def written(folder: Path, *steps: StepRecord, earlier=()) -> Path:
    writer = MetricsWriter(folder, RUN, earlier)
    for step in steps:
        writer.append(step)
    return writer.path


def test_what_is_written_is_read_again(tmp_path):
    path = written(tmp_path / "new" / "folder", STEP, EVALUATION)
    content = read_metrics(path)
    assert content == ([RunPart(RUN, [STEP, EVALUATION])], [])
    assert read_metrics(path.parent) == content


def test_the_lines_are_the_documented_ones(tmp_path):
    run, step, evaluation = map(json.loads, written(tmp_path, STEP, EVALUATION).read_text("utf-8").splitlines())
    assert run.pop("record") == "run"
    assert run.pop("version") == 1
    assert run.keys() == {"model", "optimizer", "optim", "parameters", "kinds", "report"}
    assert step == {
        "record": "step", "step": 4, "epoch": 0.5, "loss": 2.1, "learning_rate": 1e-5,
        "precision": {"all": {"lost_updates": 0.1 + 0.2}, "attention": {"lost_updates": -1e-9, "never_moved": 0.0}},
        "worst": {"lost_updates": [["layers.0.q_proj.weight", 0.99]]},
        "findings": ["attention loses 99%: use rounding=kahan"],
    }  # fmt: skip
    assert evaluation == {"record": "step", "step": 4, "epoch": 0.5, "eval_loss": 2.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "text", True])
def test_what_is_not_a_finite_number_is_left_out(tmp_path, value):
    measured = MeasuredPrecision({"all": {"lost_updates": value, "never_moved": 1.0}}, {"lost_updates": [("w", value)]})
    written(tmp_path, StepRecord(1, {"loss": value, "epoch": 0.5}, measured))
    expected = MeasuredPrecision({"all": {"never_moved": 1.0}}, {"lost_updates": []})
    assert read_metrics(tmp_path).parts[0].steps == [StepRecord(1, {"epoch": 0.5}, expected)]


def test_a_logged_number_cannot_replace_a_field_of_the_record(tmp_path):
    written(tmp_path, StepRecord(1, {"step": 7, "record": 1, "precision": 0.5, "loss": 1.0}))
    assert read_metrics(tmp_path).parts[0].steps == [StepRecord(1, {"loss": 1.0})]


def test_a_writer_killed_at_any_byte_leaves_a_readable_file(tmp_path):
    path = written(tmp_path, STEP)
    complete = path.read_bytes()
    path = written(tmp_path, STEP, StepRecord(8, {"loss": 1.0, "name_β": 2.0}))
    whole = path.read_bytes()
    for length in range(len(complete), len(whole) + 1):
        path.write_bytes(whole[:length])
        content = read_metrics(path)
        finished = length >= len(whole) - 1  # the line feed alone may be missing
        assert len(content.parts[0].steps) == (2 if finished else 1)
        assert content.notes == (
            [] if finished or length == len(complete)
            else [f"the last line of {path} is unfinished and was left out; was the run killed?"]
        )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"record": "step", "step": 1}\n', "line 1 of .* is a step, but no run has begun"),
        (b'not JSON\n{"record": "step", "step": 1}\n', "line 1 of .* is not a record"),
        (b'{"a": 1}\n', "line 1 of .* is not a record"),
        (b"[1]\n", "line 1 of .* is not a record"),
        (b"\xff\n", "line 1 of .* is not a record"),
        (b'{"record": "other"}\n', "line 1 of .* is a record of the unknown kind 'other'"),
        (b'{"record": "run", "version": 2}\n', "line 1 of .* has version 2, but this version of hf_lowprec reads up"),
        (RUN.line().encode() + b'{"record": "step"}\n', "line 2 of .* is not a record"),
    ],
)
def test_another_file_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / METRICS_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_metrics(tmp_path)


def test_a_run_that_is_resumed_drops_later_steps_and_parts(tmp_path):
    steps = [StepRecord(step, {"loss": 1.0 / step}) for step in (2, 4, 6)]
    parts = [RunPart(RUN, steps), RunPart(RUN, steps[2:])]
    kept = parts_until(parts, 4)
    assert kept == [RunPart(RUN, steps[:2])]
    written(tmp_path, StepRecord(6, {"loss": 9.0}), earlier=kept)
    assert read_metrics(tmp_path).parts == [*kept, RunPart(RUN, [StepRecord(6, {"loss": 9.0})])]


def test_a_new_run_keeps_nothing_of_the_old_file(tmp_path):
    written(tmp_path, STEP)
    written(tmp_path)
    assert read_metrics(tmp_path).parts == [RunPart(RUN, [])]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_NAME]


def test_only_the_standard_library_is_imported():
    for node in ast.walk(ast.parse(Path(hf_lowprec.metrics_file.__file__).read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names}
