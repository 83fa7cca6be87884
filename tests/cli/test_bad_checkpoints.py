"""Checkpoints that are damaged, or made to harm who reads them: every command."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typer.testing import Result

from hf_lowprec.integrations.export.parameter_names import PARAMETERS_NAME
from hf_lowprec.integrations.transformers.checkpoints.manifest import MANIFEST_NAME
from tests.support.command_output import hf_lowprec
from tests.support.planted_pickles import with_planted_files
from tests.support.training.tiny_trainer import trained


def run(*words: object) -> Result:
    """Run a command; its errors are messages, each in a line."""
    return hf_lowprec(*words, columns=1000)


def reading(checkpoint: Path, good: Path, out: Path) -> list[tuple[object, ...]]:
    """The commands that read weights; all but the last read states, too. `good` is earlier, and `out` a new folder."""
    return [
        ("inspect", checkpoint),
        ("inspect", good, checkpoint),
        ("export", checkpoint, out),
        ("doctor", checkpoint, "--lr", "1e-3", "--steps", "10"),
    ]


READ_BY = {"model.safetensors": 4, "optimizer.pt": 3}
"""How many of these commands read a file."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(folder, optim="adamw_bf16_kahan", max_steps=2, save_strategy="steps", save_steps=2)
    return folder / "checkpoint-2"


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    """A copy without a manifest, as of a stock Trainer."""
    shutil.copytree(saved, tmp_path / "checkpoint-2", ignore=shutil.ignore_patterns(MANIFEST_NAME))
    return tmp_path / "checkpoint-2"


@pytest.mark.parametrize(("name", "flipped"), [("model.safetensors", b"{"), ("optimizer.pt", b"param_groups")])
def test_damaged_files_and_files_of_another_kind_are_named(saved, checkpoint, tmp_path, name, flipped):
    content, *others = ((saved / file).read_bytes() for file in (name, "scheduler.pt", "config.json"))
    for wrong in (b"", content[: len(content) // 2], content.replace(flipped, flipped[:-1] + b"~"), *others):
        (checkpoint / name).write_bytes(wrong)
        for words in reading(checkpoint, saved, tmp_path / "out")[: READ_BY[name]]:
            result = run(*words)
            assert result.exit_code != 0 and name in result.output, (words, result.output)
    assert not (tmp_path / "out").exists()


def test_an_index_does_not_reach_outside_of_its_folder(checkpoint, tmp_path):
    """Nor does the name of an adapter, which is the name of a folder."""
    weights, secret = load_file(checkpoint / "model.safetensors"), tmp_path / "secret/model.safetensors"
    (checkpoint / "model.safetensors").unlink()
    secret.parent.mkdir()
    save_file(weights, secret, metadata={"format": "pt"})
    for name in ("../secret/model.safetensors", str(secret)):
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        assert_outside(checkpoint, name, tmp_path / "out")
    (checkpoint / "model.safetensors.index.json").unlink()
    shutil.copy(secret, checkpoint)
    names = json.loads((checkpoint / PARAMETERS_NAME).read_text()) | {"adapters": {"../secret": {}}}
    (checkpoint / PARAMETERS_NAME).write_text(json.dumps(names))
    assert "'../secret', which is outside" in run("export", checkpoint, tmp_path / "out").output


def test_nothing_that_a_file_holds_is_run(saved, tmp_path):
    """By no command, nor when training resumes. `tests/distributed/test_resuming.py` has the files of several ranks."""
    for checkpoint in with_planted_files(saved, tmp_path):
        for words in reading(checkpoint, saved, tmp_path / "out"):
            run(*words)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with contextlib.suppress(Exception):
            trained(tmp_path / "run", optim="adamw_bf16_kahan", max_steps=2, resume=str(checkpoint))


def test_links_do_not_lead_out_of_a_checkpoint(saved, checkpoint, tmp_path):
    """Those of the Hub's cache stay in it, and those inside of the checkpoint are followed."""
    (checkpoint / "tokenizer.json").symlink_to("config.json")
    cached = tmp_path / "models--one/snapshots/1"
    shutil.copytree(saved, tmp_path / "models--one/blobs")
    cached.mkdir(parents=True)
    for file in saved.iterdir():
        (cached / file.name).symlink_to(f"../../blobs/{file.name}")
    for folder in (checkpoint, cached):
        assert run("export", folder, tmp_path / f"{folder.name}-out").exit_code == 0
    for name in ("tokenizer.json", "model.safetensors", "optimizer.pt", "more"):
        (checkpoint / name).unlink(missing_ok=True)
        (checkpoint / name).symlink_to(saved / name if name.startswith(("model", "opt")) else saved)
        assert f"{name} is a link to {saved}" in run("export", checkpoint, tmp_path / "out").output
        (checkpoint / name).unlink()
    assert not (tmp_path / "out").exists()


def assert_outside(checkpoint: Path, name: str, out: Path) -> None:
    """Assert that the error of every command names the file outside of the checkpoint."""
    for words in reading(checkpoint, checkpoint, out):
        assert f"{name!r}, which is outside" in run(*words).output, words
    assert not out.exists()


def test_a_full_disk(saved, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fails)
    assert "cannot be written: Error while serializing: No space left" in run("export", saved, tmp_path / "out").output
    assert not (tmp_path / "out").exists()
