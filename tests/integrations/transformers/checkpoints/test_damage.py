"""Damaged, mixed and copied checkpoints: the last good one is resumed, or an error names the file."""

import errno
import functools
import io
import itertools
import json
import logging
import os
import pickle
import shutil
import stat
from pathlib import Path, PosixPath
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import CheckpointManager

import hf_lowprec  # noqa: F401
from hf_lowprec.integrations.checkpoint_files.stored_tensors import read_metadata
from hf_lowprec.integrations.transformers.checkpoints import manifest as manifest_module
from hf_lowprec.integrations.transformers.checkpoints import trainer_methods
from hf_lowprec.integrations.transformers.checkpoints.damage import files_that_do_not_open
from hf_lowprec.integrations.transformers.checkpoints.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestWriter,
    checksums,
    read_manifest,
)
from hf_lowprec.integrations.transformers.checkpoints.resume import check_best, choose_checkpoint
from tests.support.training.tiny_trainer import arguments, counting_data, llama, optimizer_of, trained


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("folder", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_shards_that_do_not_open_are_named(tmp_path, folder):
    """Without a manifest, which has the sizes and checksums of all files."""
    shards = tmp_path / folder
    dcp.save({"a": torch.ones(1000), "b": torch.zeros(10)}, checkpoint_id=shards, no_dist=True)
    assert files_that_do_not_open(tmp_path) == []
    (shard,) = shards.glob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content + b"more")
    assert files_that_do_not_open(tmp_path) == []
    shard.write_bytes(content[:-1])
    size = len(content)
    assert files_that_do_not_open(tmp_path) == [f"{folder}/{shard.name} has {size - 1} bytes, but {size} were written"]
    shard.unlink()
    assert files_that_do_not_open(tmp_path) == [f"{folder}/{shard.name} is missing"]
    (shards / ".metadata").write_bytes(b"no pickle")
    (problem,) = files_that_do_not_open(tmp_path)
    assert problem.startswith(f"{folder}/.metadata does not open: ")
    if folder.startswith("pytorch_model"):
        with pytest.raises(ValueError, match=r"is damaged: pytorch_model_fsdp_0/\.metadata"):
            check_best(tmp_path)
    (shards / ".metadata").unlink()
    assert files_that_do_not_open(tmp_path) == [f"{folder}/.metadata is missing"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_metadata_has_nothing_but_what_its_reader_allows(tmp_path):
    """It is a pickle; torch's own reader runs whatever it names."""
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
    tensors = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in dtypes}
    state = {"tensors": tensors, "groups": [{"lr": 1.0, "betas": (0.9, 0.99), "name": None}]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    expected = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert len(expected.state_dict_metadata) == len(tensors) + 3
    assert read_metadata(tmp_path) == expected
    text, own = pickle.dumps(expected, protocol=2), f"{PosixPath.__module__}\nPosixPath\n".encode()
    for other in (b"pathlib\nWindowsPath\n", b"pathlib._local\nPosixPath\n"):  # of Windows, of Python 3.13
        assert own in text
        (tmp_path / ".metadata").write_bytes(text.replace(own, other))
        assert read_metadata(tmp_path) == expected
    for name in ("../other/__0_0.distcp", str(tmp_path / "__0_0.distcp")):
        for part in expected.storage_data.values():
            part.relative_path = name
        (tmp_path / ".metadata").write_bytes(pickle.dumps(expected))
        with pytest.raises(ValueError, match=rf"\.metadata cannot be read: .*{name}', which is outside"):
            read_metadata(tmp_path)


def test_an_index_without_a_map_is_damaged(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert files_that_do_not_open(tmp_path) == ["model.safetensors.index.json does not open: it has no weight_map"]


SETTINGS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}
STATE = "trainer_state.json"
LOADED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", STATE, "config.json")
NOT_NEEDED = ("generation_config.json", "hf_lowprec_parameters.json", "training_args.bin")
WRITTEN = (*LOADED, *NOT_NEEDED)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flipped(path: Path, bit: int | None = None) -> None:
    """One bit, by default in the middle of the file."""
    content = bytearray(path.read_bytes())
    bit = 4 * len(content) if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def missing(path: Path) -> None:
    path.unlink()


DAMAGES = (emptied, halved, flipped, missing)


def train(out: Path, resume: str | bool | None = None, optim: str = "adamw_bf16_kahan", **settings) -> Trainer:
    return trained(out, optim=optim, resume=resume, **{**SETTINGS, **settings})


def digest(trainer: Trainer) -> list[torch.Tensor]:
    states = optimizer_of(trainer).state.values()
    return [*trainer.model.state_dict().values(), *(tensor for state in states for tensor in state.values())]


def assert_same(one: Trainer, other: Trainer) -> None:
    assert one.state.global_step == other.state.global_step
    for ours, theirs in zip(digest(one), digest(other), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Trainer]:
    """A finished training, with checkpoints of steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(out)


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    """The output folder of a run that was killed after step 4."""
    for step in (2, 4):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    return tmp_path


@pytest.fixture
def stock(killed) -> Path:
    """The same without manifests, as a stock Trainer would have written it."""
    for path in killed.glob(f"*/{MANIFEST_NAME}"):
        path.unlink()
    return killed


def assert_passed_over(out: Path, file: str, caplog) -> None:
    last, before = out / "checkpoint-4", out / "checkpoint-2"
    with pytest.raises(ValueError, match=f"checkpoint-4' (is damaged|was not finished): .*{file}.*{before.name}'"):
        choose_checkpoint(str(last), str(out))
    with caplog.at_level(logging.WARNING):
        assert choose_checkpoint(True, str(out)) == str(before)
    assert "checkpoint-4" in caplog.text and file in caplog.text


def assert_damage_is_passed_over(out: Path, file: str, seen_without_a_manifest: tuple, caplog) -> None:
    """Damage `file` of the last checkpoint of `out` in copies: in every kind where a manifest lists it."""
    for manifest in (True, False):
        for damage in DAMAGES if manifest else seen_without_a_manifest:
            copy = out / f"{manifest} {file} {damage.__name__}"
            for step in (2, 4):
                shutil.copytree(out / f"checkpoint-{step}", copy / f"checkpoint-{step}")
            if not manifest:
                (copy / "checkpoint-4" / MANIFEST_NAME).unlink()
            damage(copy / "checkpoint-4" / file)
            caplog.clear()
            assert_passed_over(copy, file, caplog)


def test_every_file_is_in_the_table_above(killed):
    assert {path.name for path in (killed / "checkpoint-4").iterdir()} == {*WRITTEN, MANIFEST_NAME}


@pytest.mark.parametrize(
    ("file", "damage"), [*itertools.product(WRITTEN, DAMAGES[:-1]), *((file, missing) for file in LOADED)]
)
def test_damage_is_seen_by_name(killed, caplog, file, damage):
    damage(killed / "checkpoint-4" / file)
    assert_passed_over(killed, file, caplog)


def test_what_resuming_does_not_need_may_be_gone(whole, killed, caplog):
    """Named in a warning; the training ends bit for bit where the whole did."""
    for file in NOT_NEEDED:
        missing(killed / "checkpoint-4" / file)
    last = str(killed / "checkpoint-4")
    assert choose_checkpoint(last, str(killed)) == choose_checkpoint(True, str(killed)) == last
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all(text.startswith(last) and text.endswith(f": {', '.join(NOT_NEEDED)}") for text in warnings)
    assert_same(train(killed, resume=True), whole[1])


def test_a_manifest_that_changed_is_read_again(killed):
    out, folder = str(killed), killed / "checkpoint-4"
    assert choose_checkpoint(True, out) == str(folder)
    content = (folder / MANIFEST_NAME).read_text()
    (folder / MANIFEST_NAME).write_text("{")
    assert choose_checkpoint(True, out) == str(killed / "checkpoint-2")
    with pytest.raises(ValueError, match=MANIFEST_NAME):
        choose_checkpoint(str(folder), out)
    (folder / MANIFEST_NAME).write_text(content)
    assert choose_checkpoint(True, out) == str(folder)


def test_every_bit_of_the_manifest_counts(killed):
    """Whatever is flipped, it is noticed or changes nothing, as in the spaces between two words of JSON."""
    folder = killed / "checkpoint-4"
    expected, content = read_manifest(folder), (folder / MANIFEST_NAME).read_bytes()
    for bit in range(0, 8 * len(content), 25):  # 25 and 8 have no common divisor: each bit of a byte is met
        flipped(folder / MANIFEST_NAME, bit)
        try:
            assert read_manifest(folder) == expected
        except ValueError as error:
            assert MANIFEST_NAME in str(error)
        (folder / MANIFEST_NAME).write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *itertools.product(LOADED, (emptied, halved)),
        *((file, missing) for file in (*LOADED[:3], STATE)),
        *((file, flipped) for file in ("optimizer.pt", "rng_state.pth")),
    ],
)
def test_damage_is_seen_by_name_without_a_manifest(stock, caplog, file, damage):
    damage(stock / "checkpoint-4" / file)
    assert_passed_over(stock, file, caplog)


def test_a_file_that_its_reader_does_not_know(stock, caplog):
    """Damage in a zip file's directory can look like a later version of the format."""
    path = stock / "checkpoint-4/optimizer.pt"
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\1\2") + 6] = 128  # the version that is needed to read the last entry
    path.write_bytes(content)
    assert_passed_over(stock, "optimizer.pt", caplog)


@pytest.mark.parametrize("name", ["killed", "stock"])
def test_times_of_files_say_nothing(request, name, tmp_path):
    """Copying a folder back from a backup in parallel gives them any order."""
    out = request.getfixturevalue(name)
    last = out / "checkpoint-4"
    for order in (sorted(last.iterdir()), sorted(last.iterdir(), reverse=True)):
        for time, path in enumerate(order):
            os.utime(path, (time, time))
        assert choose_checkpoint(True, str(out)) == str(last)
        assert choose_checkpoint(str(last), str(out)) == str(last)
    os.utime(last / "optimizer.pt")
    assert choose_checkpoint(True, str(out)) == str(last)


def test_what_is_resumed_ends_bit_for_bit_where_the_whole_did(whole, killed):
    flipped(killed / "checkpoint-4/optimizer.pt")
    assert_same(train(killed, resume=True), whole[1])


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "config.json").mkdir()


def dangling(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/nowhere/at all")


@pytest.mark.parametrize("damage", [directory, dangling])
def test_what_is_in_the_place_of_a_file_is_replaced_when_that_step_is_saved_again(whole, killed, damage):
    for file in (*WRITTEN, MANIFEST_NAME, f"{MANIFEST_NAME}.tmp"):
        damage(killed / "checkpoint-4" / file)
    (killed / "checkpoint-4/exported").mkdir()
    assert_same(train(killed, resume=True), whole[1])
    assert choose_checkpoint(str(killed / "checkpoint-4"), str(killed)) == str(killed / "checkpoint-4")
    names = {path.name for path in (killed / "checkpoint-4").iterdir()}
    assert names == {*WRITTEN, MANIFEST_NAME, "exported"}


def test_a_finished_training_is_resumed_to_what_it_was(whole, tmp_path):
    """Killed after its last checkpoint: Trainer by itself adds a step, since it looks at `max_steps` after each."""
    shutil.copytree(whole[0] / "checkpoint-6", tmp_path / "checkpoint-6")
    assert_same(train(tmp_path, resume=True), whole[1])


def test_a_second_training_that_dies_while_it_saves_over_the_first_one(whole, killed, monkeypatch, caplog):
    """New weights, and the optimizer of the first training: neither is resumed."""
    save, error = torch.save, "the process died here"

    def dies(value, path, *args, **kwargs):
        if str(path).endswith("checkpoint-4/optimizer.pt"):
            raise OSError(error)
        return save(value, path, *args, **kwargs)

    shutil.copytree(whole[0] / "checkpoint-6", killed / "checkpoint-6")
    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(OSError, match=error):
        train(killed, learning_rate=3e-3)
    monkeypatch.undo()
    assert choose_checkpoint(True, str(killed)) == str(killed / "checkpoint-2")
    assert "checkpoint-4 was not finished" in caplog.text
    assert "checkpoint-6 is from an earlier training run" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoint-4' was not finished"):
        choose_checkpoint(str(killed / "checkpoint-4"), str(killed))
    assert choose_checkpoint(str(killed / "checkpoint-6"), str(killed)) == str(killed / "checkpoint-6"), "it was named"
    second = train(killed.parent / f"{killed.name} second", learning_rate=3e-3)
    assert_same(train(killed, resume=True, learning_rate=3e-3), second)


def test_files_of_an_earlier_checkpoint_do_not_become_part_of_the_next(whole, killed, caplog):
    """Trainer loads `optimizer.pt` because it is there, also next to weights that were saved alone."""
    train(killed, max_steps=4, save_only_model=True)
    assert not (killed / "checkpoint-4/optimizer.pt").exists()
    assert choose_checkpoint(True, str(killed)) == str(killed / "checkpoint-4")
    assert "contains no optimizer state" in caplog.text


def test_a_training_that_went_back_to_an_earlier_step(whole, killed, caplog):
    """The checkpoints of the steps that it had reached before are not its last ones."""
    shutil.copytree(whole[0] / "checkpoint-6", killed / "checkpoint-6")
    train(killed, resume=str(killed / "checkpoint-2"), max_steps=3, save_steps=1)
    assert choose_checkpoint(True, str(killed)) == str(killed / "checkpoint-3")
    assert "checkpoint-6 is from an earlier training run, checkpoint-4 is from an earlier training run" in caplog.text


def test_an_earlier_training_is_no_replacement(killed):
    """Of a fresh training in the same folder only step 3 is there, and damaged: step 2 is not its own."""
    train(killed, max_steps=3, save_steps=3)
    flipped(killed / "checkpoint-3/optimizer.pt")
    with pytest.raises(
        ValueError, match=r"no checkpoint .* is complete and intact .*checkpoint-2: saved at .*; pass its path"
    ) as error:
        choose_checkpoint(True, str(killed))
    assert "by an earlier training run, before checkpoint-3" in str(error.value)


def test_a_missing_optimizer_is_damage_only_if_it_was_written(stock, caplog):
    last = stock / "checkpoint-4"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (last / name).unlink()
    assert choose_checkpoint(True, str(stock)) == str(last)
    assert "contains no optimizer state" in caplog.text
    assert train(stock, resume=True).state.global_step == 6


def test_a_state_of_another_version_of_transformers_is_resumed(whole, stock, caplog):
    path = stock / "checkpoint-4" / STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), "a_field_of_tomorrow": {"a": 1}}))
    assert_same(train(stock, resume=True), whole[1])
    assert "a_field_of_tomorrow" in caplog.text


@pytest.mark.parametrize(
    "content", ["[" * 10**5, '{"a":' * 10**5, '{"global_step": "4"}', '{"log_history": 4}', "\xff", "1" * 5000]
)
def test_a_state_that_is_no_state(stock, caplog, content):
    (stock / "checkpoint-4" / STATE).write_text(content, encoding="latin-1")
    assert_passed_over(stock, STATE, caplog)


@pytest.fixture(scope="module")
def killed_after_saving(tmp_path_factory) -> Path:
    """The output folder of a run that was killed when older checkpoints were gone and `on_save` was to come."""
    out = tmp_path_factory.mktemp("rotated")

    class Copies(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 4:
                shutil.copytree(args.output_dir, out / "killed")

    train(out / "whole", save_total_limit=1, callbacks=[Copies()])
    return out / "killed"


def test_nothing_is_lost_between_the_deletion_of_older_checkpoints_and_the_manifest(whole, killed_after_saving):
    (last,) = killed_after_saving.glob("checkpoint-*")
    assert not read_manifest(last).complete
    assert_same(train(killed_after_saving, resume=True), whole[1])


def test_an_old_checkpoint_never_has_the_manifest_of_the_next(killed, monkeypatch):
    """It is no checkpoint any more when a process dies as soon as it has written the manifest."""

    def dies(folder, manifest):
        write(folder, manifest)
        raise InterruptedError

    write = manifest_module._write
    monkeypatch.setattr(manifest_module, "_write", dies)
    with pytest.raises(InterruptedError):
        train(killed, max_steps=4, save_steps=4)
    with pytest.raises(ValueError, match=f"checkpoint-4' was not finished: {STATE} is missing"):
        choose_checkpoint(str(killed / "checkpoint-4"), str(killed))


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", STATE])
def test_an_incomplete_manifest_and_a_missing_file(killed_after_saving, tmp_path, file):
    shutil.copytree(killed_after_saving / "checkpoint-4", tmp_path / "checkpoint-4")
    missing(tmp_path / "checkpoint-4" / file)
    with pytest.raises(ValueError, match=f"checkpoint-4' was not finished: {file}.* missing"):
        choose_checkpoint(str(tmp_path / "checkpoint-4"), str(tmp_path))


@pytest.mark.parametrize(("on_each_node", "ranks"), [(False, range(4)), (True, (2, 3))])
def test_a_manifest_expects_the_random_states_that_come_to_its_folder(monkeypatch, on_each_node, ranks):
    """On the second of two machines with two ranks each, which may share the folder."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = SimpleNamespace(save_only_model=False, world_size=4, process_index=2, save_on_each_node=on_each_node)
    assert trainer_methods._random_states(args) == [f"rng_state_{rank}.pth" for rank in ranks]


class ChangesCheckpoints(TrainerCallback):
    """Adds a file, changes one and deletes one, as callbacks for adapters do."""

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        (folder / "notes.txt").write_text("good")
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").unlink()


def test_callbacks_may_change_a_checkpoint(tmp_path, caplog):
    train(tmp_path, max_steps=2, callbacks=[ChangesCheckpoints()])
    last = tmp_path / "checkpoint-2"
    assert choose_checkpoint(str(last), str(tmp_path)) == str(last)
    (last / "added later.txt").write_text("what is not in the manifest does not matter")
    assert choose_checkpoint(str(last), str(tmp_path)) == str(last)
    (last / "notes.txt").unlink()
    with pytest.raises(ValueError, match=r"notes.txt is missing; pass another one"):
        choose_checkpoint(str(last), str(tmp_path))


def test_weights_in_several_files(tmp_path, caplog):
    model = llama()
    model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size="20KB")
    train(tmp_path, max_steps=4, model=model)
    shards = sorted(path.name for path in (tmp_path / "checkpoint-4").glob("model-*.safetensors"))
    assert len(shards) > 1
    index = "model.safetensors.index.json"
    assert_damage_is_passed_over(tmp_path, shards[0], (emptied, halved, missing), caplog)
    assert_damage_is_passed_over(tmp_path, index, (emptied, halved), caplog)  # the shards alone are weights as well


def test_adapters(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"])
    train(tmp_path, max_steps=4, model=peft.get_peft_model(llama(), config))
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert_damage_is_passed_over(tmp_path, file, (emptied, halved), caplog)


@pytest.mark.parametrize("damage", [flipped, halved])
def test_a_damaged_best_checkpoint_is_not_loaded_at_the_end(tmp_path, damage):
    class DamagesTheBest(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                missing(tmp_path / "checkpoint-2/optimizer.pt")  # weights are all that is loaded
                damage(tmp_path / "checkpoint-2/model.safetensors")

    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    with pytest.raises(ValueError, match=r"checkpoint-2', the best checkpoint, is damaged: model.safetensors") as error:
        train(tmp_path, callbacks=[DamagesTheBest()], **settings)  # the highest loss is called the best: the first
    assert "optimizer" not in str(error.value)


def test_a_checkpoint_that_is_saved_on_sigterm(whole, killed):
    """A file says so in the checkpoint while it is saved, and is deleted when it is complete."""
    whole[1].args.output_dir, before = str(killed), whole[1].args.output_dir
    try:
        CheckpointManager(whole[1]).execute_jit_checkpoint()
    finally:
        whole[1].args.output_dir = before
    assert choose_checkpoint(True, str(killed)) == str(killed / "checkpoint-6")


def saved_at(time: str) -> Manifest:
    return Manifest(run="a machine whose clock is ahead", saved=time, global_step=0, optimizer="")


def save(writer: ManifestWriter, folder: Path, step: int) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    writer.begin(checkpoint, step, None, random_states=[])
    (checkpoint / "trainer_state.json").write_text("{}")
    save_file({"weight": torch.tensor(step)}, checkpoint / "model.safetensors")
    writer.complete(checkpoint, {})
    return checkpoint


def test_clocks_do_not_order_the_trainings_in_a_folder(tmp_path):
    """The first one ran where the clock was ahead."""
    ahead = ManifestWriter(saved_at("2999-01-01T00:00:00.000000+00:00"))
    for step in (4, 6):
        save(ahead, tmp_path, step)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / MANIFEST_NAME).write_text("{}")  # a damaged one says nothing
    second = ManifestWriter()
    assert choose_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-6")
    assert str(save(second, tmp_path, 2)) == choose_checkpoint(True, str(tmp_path))
    save(second, tmp_path, 3)
    again = ManifestWriter(read_manifest(tmp_path / "checkpoint-2"))
    assert str(save(again, tmp_path, 1)) == choose_checkpoint(True, str(tmp_path)), "it went back to an earlier step"


def test_checkpoints_of_another_run_are_named_once(tmp_path, caplog):
    first = ManifestWriter()
    for writer in (first, first, ManifestWriter(read_manifest(save(first, tmp_path, 2)))):
        save(writer, tmp_path, 4)
    assert not caplog.records, "a resumed run saves its own checkpoints again"
    second = ManifestWriter()
    for step in (2, 4):
        save(second, tmp_path, step)
    (record,) = caplog.records
    assert f"{tmp_path} has checkpoints of another training run (2, the first is checkpoint-2)" in record.getMessage()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("refused", [stat.S_ISREG, stat.S_ISDIR])
def test_a_file_system_without_fsync(tmp_path, monkeypatch, refused, code):
    """For files or for directories; an error that means lost data ends the training."""

    def fsync(descriptor: int) -> None:
        if refused(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    if code in (errno.EINVAL, errno.ENOTSUP):
        assert read_manifest(save(ManifestWriter(), tmp_path, 1)).complete
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            save(ManifestWriter(), tmp_path, 1)


class ShortReads(io.FileIO):
    """A file of a network's or user's file system, which may return less than asked for."""

    def read(self, size=-1):
        return super().read(min(size, 1000) if size >= 0 else 1000)

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:1000])


def test_checksums_are_of_whole_files_where_reads_return_less(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * 100)
    expected = checksums([path])
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, mode, buffering=-1: (io.BufferedReader if buffering else lambda raw: raw)(ShortReads(self)),
    )
    assert checksums([path]) == expected


def test_every_part_of_a_large_file_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_lowprec.integrations.transformers.checkpoints.manifest.CHUNK_BYTES", 1000)
    path, found = tmp_path / "model.safetensors", set()
    for flipped in (0, 999, 1000, 2500, 2999):
        path.write_bytes(bytes(k == flipped for k in range(3000)))
        found |= set(checksums([path]).values())
    assert len(found) == 5


def test_checkpoints_of_others_stay_as_they_are(tmp_path):
    Trainer(llama(), arguments(tmp_path, max_steps=1, save_strategy="steps"), train_dataset=counting_data()).train()
    assert not list(tmp_path.glob(f"*/{MANIFEST_NAME}*"))


def test_a_checkpoint_that_does_not_fit_the_disk(tmp_path, monkeypatch, caplog):
    """torch's message does not mention the disk."""

    def save(*args, **kwargs):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 454208 vs 454096")

    settings = {"optim": "adamw_bf16_kahan", "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    with monkeypatch.context() as full, pytest.raises(RuntimeError, match="unexpected pos"):
        full.setattr(torch, "save", save)
        trained(tmp_path, **settings)
    (said,) = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    free = shutil.disk_usage(tmp_path).free // 2**20
    assert said.startswith(f"hf_lowprec: {tmp_path}/checkpoint-1 was not finished, so resuming will skip it; its disk ")
    assert abs(int(said.split()[-3]) - free) < 1000
    with pytest.raises(ValueError, match=r"checkpoint-1: trainer_state.json is missing"):
        choose_checkpoint(True, str(tmp_path))
