"""The metrics file of a Trainer's run: what is in it, and what remains of it when the run is resumed."""

import json
import logging
import shutil
import signal
from pathlib import Path

import pytest
from transformers import TrainerCallback

import hf_lowprec
from hf_lowprec.integrations.transformers.checkpoints.manifest import read_manifest
from hf_lowprec.metrics_file import METRICS_NAME, read_metrics
from tests.support.processes import forkserver
from tests.support.training.tiny_trainer import LOAD_BEST, llama, trained

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SAVING = {"optim": "adamw_bf16_kahan", "logging_steps": 1, "save_strategy": "steps", "save_steps": 4, "max_steps": 8}


def steps(folder: Path) -> list[list[int]]:
    """The steps of each part of the run."""
    content = read_metrics(folder)
    assert content.notes == []
    return [[record.step for record in part.steps] for part in content.parts]


def lines(path: Path) -> list[str]:
    return (path / METRICS_NAME).read_text(encoding="utf-8").splitlines()


def test_every_log_with_the_precision_of_its_step(tmp_path, capsys):
    callback, measured = hf_lowprec.LowPrecisionCallback(), {}

    class Listening(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if callback.precision is not None:
                measured[state.global_step] = callback.precision

    trainer = trained(tmp_path, optim="adamw_bf16_kahan", callbacks=[callback, Listening()], **LOAD_BEST)
    (part,) = read_metrics(tmp_path).parts
    logged = [dict(entry) for entry in trainer.state.log_history if "train_runtime" not in entry]
    assert [record.logged | {"step": record.step} for record in part.steps] == logged
    assert [record.step for record in part.steps] == [4, 4, 8, 8, 12, 12]
    assert {record.step: dict(record.measured.by_kind) for record in part.steps if record.measured} == {
        step: precision.by_kind for step, precision in measured.items()
    }
    assert [record.measured is None for record in part.steps] == 3 * [False, True]  # nothing to measure in evaluations
    worst = part.steps[0].measured.worst["never_moved"]
    assert worst == measured[4].worst("never_moved", 5)
    assert part.run.report in capsys.readouterr().out


def test_a_stock_optimizer_writes_it_with_the_callback_only(tmp_path):
    settings = {"optim": "adamw_torch", "learning_rate": 1e-5, "logging_steps": 1, "max_steps": 1}
    trained(tmp_path / "stock", model=llama().bfloat16(), **settings)
    assert not (tmp_path / "stock" / METRICS_NAME).exists()
    callback = hf_lowprec.LowPrecisionCallback(report=False)
    trained(tmp_path / "watched", model=llama().bfloat16(), callbacks=[callback], **settings)
    (part,) = read_metrics(tmp_path / "watched").parts
    assert (part.run.optimizer, part.run.optim) == ("AdamW", "adamw_torch")
    assert part.steps[0].measured.by_kind["all"]["changed"] < 0.2
    assert "Weight updates are lost in rounding" in part.steps[0].measured.findings[0]


def test_the_run_record_counts_parameters_by_kind_and_dtype(tmp_path):
    trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)
    run = read_metrics(tmp_path).parts[0].run
    assert (run.model, run.optimizer, run.optim) == ("LlamaForCausalLM", "AdamW", "adamw_bf16_kahan")
    # Two layers of width 32: 4 matrices of 32² in each attention, 3 of 32 × 64 in each MLP, and 5 norms.
    assert run.kinds == {
        "embeddings": {"tensors": 1, "parameters": 64 * 32, "dtypes": {"bfloat16": 64 * 32}},
        "attention": {"tensors": 8, "parameters": 8 * 32 * 32, "dtypes": {"bfloat16": 8 * 32 * 32}},
        "mlp": {"tensors": 6, "parameters": 6 * 32 * 64, "dtypes": {"bfloat16": 6 * 32 * 64}},
        "norms": {"tensors": 5, "parameters": 5 * 32, "dtypes": {"float32": 5 * 32}},
        "head": {"tensors": 1, "parameters": 64 * 32, "dtypes": {"bfloat16": 64 * 32}},
    }
    assert run.parameters == sum(kind["parameters"] for kind in run.kinds.values())


def test_findings_are_in_the_record_of_their_step(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_lowprec"):
        settings = {"optim": "adamw_bf16_kahan", "optim_args": "rounding=nearest", "learning_rate": 1e-6}
        trained(tmp_path, logging_steps=2, max_steps=8, **settings)
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("hf_lowprec")]
    found = [record.measured.findings for record in read_metrics(tmp_path).parts[0].steps]
    assert len(found) == 4 and all(found)
    first = {f"hf_lowprec: {sentence}" for sentence in found[0]}
    assert len([line for line in warned if line in first]) == len(first)  # at later logs they are only in the file


def test_without_a_report_and_measurements_the_logs_are_still_written(tmp_path, capsys):
    callback = hf_lowprec.LowPrecisionCallback(report=False, log_lost_updates=False)
    trained(tmp_path, callbacks=[callback], optim="adamw_bf16_kahan")
    (part,) = read_metrics(tmp_path).parts
    assert [record.measured for record in part.steps] == [None, None, None]
    assert part.run.report
    assert "bfloat16 training" not in capsys.readouterr().out


def test_a_trainer_that_is_not_ours_writes_no_file(tmp_path):
    trained(tmp_path, optim="adamw_torch", max_steps=1)
    assert not (tmp_path / METRICS_NAME).exists()


def test_a_new_run_starts_a_new_file(tmp_path):
    trained(tmp_path, **SAVING)
    (tmp_path / "checkpoint-4" / METRICS_NAME).write_text("of an earlier run")
    trained(tmp_path, **SAVING | {"max_steps": 4})
    assert steps(tmp_path) == steps(tmp_path / "checkpoint-4") == [[1, 2, 3, 4]]


@pytest.mark.parametrize("path", [str, Path])
def test_a_resumed_run_continues_the_file_of_its_checkpoint(tmp_path, path):
    trained(tmp_path, **SAVING)
    whole = lines(tmp_path)
    assert lines(tmp_path / "checkpoint-4") == whole[:5]
    assert METRICS_NAME in read_manifest(tmp_path / "checkpoint-4").files
    trained(tmp_path, resume=path(tmp_path / "checkpoint-4"), **SAVING)
    assert steps(tmp_path) == steps(tmp_path / "checkpoint-8") == [[1, 2, 3, 4], [5, 6, 7, 8]]
    resumed = lines(tmp_path)
    assert resumed[:5] == whole[:5]  # byte for byte
    losses = [[json.loads(line).get("loss") for line in run] for run in (whole, resumed)]
    assert losses[1] == losses[0][:5] + losses[0][:1] + losses[0][5:]  # with the second run record


def test_a_run_resumed_in_another_folder_continues_the_file(tmp_path):
    trained(tmp_path / "first", **SAVING)
    before = lines(tmp_path / "first")
    trained(tmp_path / "second", resume=str(tmp_path / "first" / "checkpoint-4"), **SAVING)
    assert steps(tmp_path / "second") == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert lines(tmp_path / "first") == before
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / METRICS_NAME).write_text("\n".join(before))  # of a run that has nothing to do with it
    trained(tmp_path / "third", resume=str(tmp_path / "first" / "checkpoint-8"), **SAVING | {"max_steps": 9})
    assert steps(tmp_path / "third") == [[1, 2, 3, 4, 5, 6, 7, 8], [9]]


@pytest.mark.parametrize(("same_folder", "expected"), [(True, [[1, 2, 3, 4], [5, 6, 7, 8]]), (False, [[5, 6, 7, 8]])])
def test_a_checkpoint_without_the_file(tmp_path, same_folder, expected):
    first, second = tmp_path / "first", tmp_path / ("first" if same_folder else "second")
    trained(first, **SAVING)
    (first / "checkpoint-4" / METRICS_NAME).unlink()
    if not same_folder:  # a file of another run
        second.mkdir()
        shutil.copyfile(first / METRICS_NAME, second / METRICS_NAME)
    trained(second, resume=str(first / "checkpoint-4"), **SAVING)
    assert steps(second) == expected


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_continues(tmp_path):
    died = forkserver.run(SCRIPTS / "killed_in_log.py", ["7", str(tmp_path)], timeout=240)
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    content = read_metrics(tmp_path)
    assert [record.step for record in content.parts[0].steps] == [1, 2, 3, 4, 5, 6]
    assert len(content.notes) == 1
    trained(tmp_path, resume=True, **SAVING)
    assert steps(tmp_path) == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_file_that_cannot_be_written_does_not_stop_training(tmp_path, caplog):
    (tmp_path / METRICS_NAME).mkdir()  # root may write anywhere, but not a file in place of a folder
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / METRICS_NAME).write_text("of an earlier run")
    with caplog.at_level(logging.WARNING, "hf_lowprec"):
        assert trained(tmp_path, **SAVING).state.global_step == 8
    assert len([record for record in caplog.records if "cannot be written" in record.getMessage()]) == 1
    assert not (tmp_path / "checkpoint-8" / METRICS_NAME).exists()


def test_a_file_that_disappears_does_not_stop_training(tmp_path, caplog):
    class Deleting(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                (tmp_path / METRICS_NAME).unlink()

    with caplog.at_level(logging.WARNING, "hf_lowprec"):
        assert trained(tmp_path, callbacks=[Deleting()], **SAVING).state.global_step == 8
    assert len([record for record in caplog.records if "cannot be written" in record.getMessage()]) == 1


def test_the_copy_of_a_loaded_model_folder_is_not_mistaken_for_a_run(tmp_path):
    """A model that is trained further from its files is a new run."""
    trained(tmp_path / "first", **SAVING)
    shutil.copytree(tmp_path / "first" / "checkpoint-8", tmp_path / "second")
    model = type(llama()).from_pretrained(tmp_path / "second")
    trained(tmp_path / "second", model=model, **SAVING | {"max_steps": 2})
    assert steps(tmp_path / "second") == [[1, 2]]
