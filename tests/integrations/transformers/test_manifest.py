"""A kill at any moment of saving loses at most that checkpoint; the newest whole one is resumed."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import CheckpointManager

import hf_lowprec  # noqa: F401
from hf_lowprec.integrations.transformers.checkpoints.manifest import (
    MANIFEST_NAME,
    begin_checkpoint,
    examine,
    finish_checkpoint,
)
from hf_lowprec.integrations.transformers.checkpoints.resume import choose_checkpoint
from tests.golden.trainer import CHECKPOINT as RECORDED
from tests.support.training.tiny_trainer import arguments, assert_same, counting_data, llama, trained

SETTINGS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}
STATE = "trainer_state.json"


def train(out: Path, resume: str | bool | None = None, optim: str = "adamw_bf16_kahan", **settings) -> Trainer:
    return trained(out, optim=optim, resume=resume, **{**SETTINGS, **settings})


def assert_resumed(trainer: Trainer, whole: Trainer) -> None:
    assert trainer.state.global_step == whole.state.global_step
    assert_same(trainer, whole)


def newest(out: Path) -> str:
    return Path(choose_checkpoint(True, str(out))).name


def refusal(resume: str | Path | bool, out: Path) -> str:
    with pytest.raises(ValueError, match="complete") as error:
        choose_checkpoint(resume, str(out))
    return str(error.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Trainer]:
    """A finished training, with checkpoints of steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(out)


@pytest.fixture
def out(whole, tmp_path) -> Path:
    """The output folder of a run that was killed after step 4."""
    for step in (2, 4):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    return tmp_path


@pytest.fixture
def stock(out) -> Path:
    """The same without manifests, as a stock Trainer would have written it."""
    for path in out.glob(f"*/{MANIFEST_NAME}"):
        path.unlink()
    return out


class Copies:
    """Copies a folder before every change that Python makes in it, as a kill at that moment would leave it."""

    def __init__(self, folder: Path, to: Path) -> None:
        self.folder, self.to, self.count, self.watching = folder, to, 0, True
        sys.addaudithook(self.see)  # which cannot be taken back

    def see(self, event: str, args: tuple) -> None:
        changes = event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir") or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if self.watching and changes:
            self.watching = False
            shutil.copytree(self.folder, self.to / f"{self.count}")
            self.count += 1
            self.watching = True

    def __iter__(self) -> Iterator[Path]:
        return (self.to / f"{k}" for k in range(self.count))


@pytest.mark.parametrize("earlier_run", [False, True])
def test_a_kill_at_any_moment_of_saving(tmp_path, earlier_run):
    """In a new folder, of which `save_total_limit` leaves one checkpoint; and over the checkpoints of another run."""

    def contents(checkpoint: Path) -> tuple[str, bytes, bytes]:
        files = ("model.safetensors", "optimizer.pt")
        return (checkpoint.name, *((checkpoint / file).read_bytes() for file in files))

    run, references = tmp_path / "run", {}
    run.mkdir()
    for name, settings in {"earlier": {"learning_rate": 3e-3}, "run": {}}.items():
        train(tmp_path / "reference" / name, max_steps=4, **settings)
        references[name] = [contents(tmp_path / f"reference/{name}/checkpoint-{step}") for step in (2, 4)]
    expected = references["run"]
    if earlier_run:
        shutil.copytree(tmp_path / "reference/earlier", run, dirs_exist_ok=True)
        expected = [references["earlier"][1], *expected]
    copies = Copies(run, tmp_path / "copies")
    train(run, max_steps=4, save_total_limit=None if earlier_run else 1)
    copies.watching = False

    found = []
    for copy in copies:
        try:
            found.append(contents(copy / newest(copy)))
        except (ValueError, TypeError):
            assert not found, "there was a whole one before"
    assert len(found) > 20
    assert [content for content, _ in groupby(found)] == expected
    assert (len([*run.glob("checkpoint-*")]) == 1) != earlier_run


def test_an_earlier_manifest_does_not_count_for_files_of_the_same_sizes(tmp_path):
    (tmp_path / "model").write_text("earlier")
    finish_checkpoint(tmp_path)
    assert examine(tmp_path).problems == []
    begin_checkpoint(tmp_path)
    (tmp_path / "model").write_text("another")
    assert examine(tmp_path).problems == ["saving was not finished"]
    finish_checkpoint(tmp_path)
    assert examine(tmp_path).problems == []


def test_other_files_than_were_saved(whole, out, caplog):
    """They are named; without its manifest, a checkpoint is what a stock Trainer has written."""
    last, before = out / "checkpoint-4", out / "checkpoint-2"
    size = (last / "optimizer.pt").stat().st_size
    os.truncate(last / "optimizer.pt", size // 2)
    (last / "rng_state.pth").unlink()
    problems = f"optimizer.pt has {size // 2} bytes instead of {size}, rng_state.pth is missing"
    assert refusal(str(last), out) == (
        f"resume_from_checkpoint={str(last)!r} is not a complete checkpoint: {problems}. Pass another one, or delete "
        f"its {MANIFEST_NAME} if you changed the files on purpose"
    )
    assert choose_checkpoint(True, str(out)) == str(before)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning == f"resuming from {before}; skipped: checkpoint-4 ({problems})"
    assert_resumed(train(out, resume=True), whole[1])
    (before / "config.json").unlink()
    begin_checkpoint(last)
    shutil.rmtree(out / "checkpoint-6")
    assert refusal(True, out) == (
        f"no checkpoint in {str(out)!r} is complete: checkpoint-4 (saving was not finished), checkpoint-2 (config.json "
        "is missing); start again without resume_from_checkpoint, or pass the path of another checkpoint"
    )
    (before / MANIFEST_NAME).unlink()
    assert choose_checkpoint(str(before), str(out)) == str(before)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not readable JSON"),
        ("{}", "cannot be used: 'saved'"),
        ('{"format": 3, "saved": "2026-11-22T03:22:13+00:00", "files": {}}', "it has format 3, and this version"),
        ('{"format": 2, "saved": "2026-11-22T03:22:13+00:00", "files": 3}', "cannot be used: 'int' object"),
    ],
)
def test_a_manifest_that_cannot_be_used(out, content, said):
    (out / "checkpoint-4" / MANIFEST_NAME).write_text(content)
    assert newest(out) == "checkpoint-2"
    message = refusal(str(out / "checkpoint-4"), out)
    assert f"{MANIFEST_NAME} " in message and said in message


def test_manifests_with_checksums(tmp_path):
    """Those of the first format, also of a checkpoint that was not finished."""
    checkpoint = shutil.copytree(RECORDED, tmp_path / "checkpoint-2")
    content = json.loads((checkpoint / MANIFEST_NAME).read_text())
    assert content["format"] == 1 and newest(tmp_path) == "checkpoint-2"
    os.truncate(checkpoint / "scheduler.pt", 100)
    assert examine(checkpoint).problems == ["scheduler.pt has 100 bytes instead of 1465"]
    (checkpoint / MANIFEST_NAME).write_text(json.dumps({**content, "complete": False, "files": {}}))
    assert examine(checkpoint).problems == ["saving was not finished"]


def saved(folder: Path, step: int) -> str:
    begin_checkpoint(folder / f"checkpoint-{step}")
    (folder / f"checkpoint-{step}" / STATE).write_text("{}")
    finish_checkpoint(folder / f"checkpoint-{step}")
    return f"checkpoint-{step}"


def test_the_newest_is_the_last_that_was_saved(tmp_path, caplog):
    """Whatever its step, the times of files, and the clock of the machine that saved earlier ones."""
    first = saved(tmp_path, 900)
    path = tmp_path / first / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "saved": "2999-01-01T00:00:00+00:00"}))
    for step in (200, 1000, 300):
        assert saved(tmp_path, step) == newest(tmp_path)
    os.utime(tmp_path / first / STATE)
    shutil.copytree(tmp_path / first, tmp_path / "checkpoint-2000")
    shutil.copytree(tmp_path / first, tmp_path / "checkpoint-best")
    caplog.clear()
    assert newest(tmp_path) == "checkpoint-300"
    earlier = [f"checkpoint-{step} (saved earlier)" for step in (1000, 2000, 900)]
    assert caplog.records[0].getMessage().endswith(f"skipped: {', '.join(earlier)}")
    assert choose_checkpoint(str(tmp_path / first), str(tmp_path)) == str(tmp_path / first)


def test_checkpoints_of_a_stock_trainer(whole, stock, caplog):
    """The highest step, if nothing has a manifest: of those with the file that Trainer writes last."""
    (stock / "checkpoint-10").mkdir()
    assert newest(stock) == "checkpoint-4" and f"skipped: checkpoint-10 ({STATE} is missing)" in caplog.text
    assert f"not a complete checkpoint: {STATE} is missing. Pass another one" in refusal(
        str(stock / "checkpoint-10"), stock
    )
    assert_resumed(train(stock, resume=True), whole[1])
    shutil.copytree(stock / "checkpoint-4", stock / "checkpoint-20")
    assert newest(stock) == "checkpoint-6"
    assert f"checkpoint-20 (no {MANIFEST_NAME}), checkpoint-10 ({STATE} is missing)" in caplog.text
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (stock / "checkpoint-4" / name).unlink()
    assert choose_checkpoint(str(stock / "checkpoint-4"), str(stock)) == str(stock / "checkpoint-4")
    assert "contains no optimizer state" in caplog.text


def test_nothing_to_resume_from_is_left_to_trainer(tmp_path):
    for resume in (None, False, "hub/name"):
        assert choose_checkpoint(resume, str(tmp_path)) == resume
    for folder in (tmp_path, tmp_path / "absent"):
        assert choose_checkpoint(True, str(folder)) is True


def test_files_of_an_earlier_checkpoint_do_not_become_part_of_the_next(out, caplog):
    """Trainer loads `optimizer.pt` because it is there, also next to weights that were saved alone."""
    (out / "checkpoint-4/exported").mkdir()
    (out / "checkpoint-4/model.safetensors").unlink()
    (out / "checkpoint-4/model.safetensors").symlink_to("/nowhere/at all")
    train(out, max_steps=4, save_only_model=True)
    assert {path.name for path in (out / "checkpoint-4").iterdir()}.isdisjoint(("optimizer.pt", "exported"))
    assert newest(out) == "checkpoint-4"
    assert "contains no optimizer state" in caplog.text


class ChangesCheckpoints(TrainerCallback):
    """Adds a file, changes one and deletes one, as callbacks for adapters do."""

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        (folder / "notes.txt").write_text("good")
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").unlink()


def test_callbacks_may_change_a_checkpoint(tmp_path):
    train(tmp_path, max_steps=2, callbacks=[ChangesCheckpoints()])
    last = tmp_path / "checkpoint-2"
    (last / "added later.txt").write_text("what is not in the manifest does not matter")
    assert choose_checkpoint(str(last), str(tmp_path)) == str(last)
    (last / "notes.txt").unlink()
    assert "notes.txt is missing" in refusal(str(last), tmp_path)


def test_a_checkpoint_that_is_saved_on_sigterm(whole, out):
    """transformers keeps a file in it while it is saved, and there is no `on_save`."""
    whole[1].args.output_dir, before = str(out), whole[1].args.output_dir
    try:
        CheckpointManager(whole[1]).execute_jit_checkpoint()
    finally:
        whole[1].args.output_dir = before
    assert newest(out) == "checkpoint-6"
    kept = out / "checkpoint-9" / "checkpoint-is-incomplete.txt"
    kept.parent.mkdir()
    kept.touch()
    begin_checkpoint(kept.parent)
    assert kept.exists()


def test_a_finished_training_is_resumed_to_what_it_was(whole, tmp_path):
    """Killed after its last checkpoint: Trainer by itself adds a step, since it looks at `max_steps` after each."""
    shutil.copytree(whole[0] / "checkpoint-6", tmp_path / "checkpoint-6")
    assert_resumed(train(tmp_path, resume=True), whole[1])


def test_a_state_of_another_version_of_transformers_is_resumed(whole, stock, caplog):
    path = stock / "checkpoint-4" / STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), "a_field_of_tomorrow": {"a": 1}}))
    assert_resumed(train(stock, resume=True), whole[1])
    assert "a_field_of_tomorrow" in caplog.text


def test_checkpoints_of_others_stay_as_they_are(tmp_path):
    Trainer(llama(), arguments(tmp_path, max_steps=1, save_strategy="steps"), train_dataset=counting_data()).train()
    assert [*tmp_path.glob("checkpoint-*")] and not [*tmp_path.glob(f"*/{MANIFEST_NAME}*")]


def test_a_checkpoint_that_does_not_fit_the_disk(tmp_path, monkeypatch, caplog):
    """torch's message does not mention the disk."""

    def save(*args, **kwargs):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 454208 vs 454096")

    with monkeypatch.context() as full, pytest.raises(RuntimeError, match="unexpected pos"):
        full.setattr(torch, "save", save)
        train(tmp_path)
    (said,) = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    free = shutil.disk_usage(tmp_path).free // 2**20
    assert said.startswith(f"hf_lowprec: {tmp_path}/checkpoint-2 was not finished, so resuming will skip it; its disk ")
    assert abs(int(said.split()[-3]) - free) < 1000
    assert "checkpoint-2 (saving was not finished)" in refusal(True, tmp_path)
