"""Several ranks resume from the same checkpoint, one that is whole for all of them."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from accelerate import PartialState
from accelerate.utils import gather_object

from hf_lowprec.integrations.transformers.checkpoints.manifest import (
    MANIFEST_NAME,
    begin_checkpoint,
    finish_checkpoint,
)
from hf_lowprec.integrations.transformers.checkpoints.resume import choose_checkpoint
from tests.cli.test_bad_checkpoints import reading
from tests.support.command_output import hf_lowprec
from tests.support.planted_pickles import with_planted_files
from tests.support.processes import forkserver
from tests.support.processes.ranks import SCRIPTS, on_ranks, run_trainer

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

FOUR_STEPS = "--optim adamw_bf16_kahan --max_steps 4 --save_strategy steps --save_steps 2"


def machines(folder: Path) -> Path:
    """Two folders, with checkpoints of steps 2 and 4 in each."""
    for rank, step in itertools.product((0, 1), (2, 4)):
        checkpoint = folder / f"{rank}/out/checkpoint-{step}"
        begin_checkpoint(checkpoint)
        (checkpoint / "model.safetensors").write_bytes(b"weights")
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step, "train_batch_size": 8}))
        finish_checkpoint(checkpoint)
    return folder


def choose(questions: list[list]) -> list[list[str]]:
    """What each rank is told; rank R runs in FOLDER/R, and asks for the R-th or the last of what follows FOLDER."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"  # every rank is a machine with files of its own
    PartialState(cpu=True)
    answers = []
    for folder, *asked in questions:
        os.chdir(os.path.join(folder, str(rank)))
        try:
            answer = choose_checkpoint(asked[min(rank, len(asked) - 1)], "out")
        except ValueError as error:
            answer = f"ValueError: {error}"
        answers.append(gather_object([answer]))
    return answers


def test_machines_that_see_different_files(tmp_path):
    """All ranks resume from the same checkpoint, one that is whole on all of them, or all raise the same error."""
    damaged, partial = machines(tmp_path / "damaged"), machines(tmp_path / "partial")
    os.truncate(damaged / "1/out/checkpoint-4/model.safetensors", 4)
    shutil.rmtree(partial / "1/out/checkpoint-4")
    expected = {
        (damaged, True): r"out/checkpoint-2$",
        (damaged, "out/checkpoint-4"): r"ValueError: .*'out/checkpoint-4' is not a complete checkpoint: "
        r"model.safetensors has 4 bytes instead of 7 \(as rank 1 sees it\)",
        (damaged, True, "out/checkpoint-2"): r"ValueError: .* differs between ranks: \[True, 'out/checkpoint-2'\]",
        (partial, True): r"ValueError: rank 1 cannot see 'out/checkpoint-4'.*save_on_each_node=True",
        (partial, "out/checkpoint-4"): r"ValueError: rank 1 cannot see 'out/checkpoint-4'",
        (partial, "out/checkpoint-2"): r"out/checkpoint-2$",
        (partial, "hub/name"): r"hub/name$",
    }
    for pattern, answers in zip(expected.values(), on_ranks(choose, 2, [*expected]), strict=True):
        assert all(re.match(pattern, answer) for answer in answers), (pattern, answers)


@pytest.mark.parametrize("saved", ["ddp", pytest.param("FULL_STATE_DICT", marks=pytest.mark.every_case)])
def test_a_checkpoint_that_holds_the_model_in_another_way(tmp_path, saved):
    """accelerate raises FileNotFoundError on one rank, and the other waits for it."""
    run_trainer(2, "ddp" if saved == "ddp" else "fsdp2", tmp_path, FOUR_STEPS, STATE_DICT_TYPE=saved)
    again = f"{FOUR_STEPS} --resume_from_checkpoint {tmp_path / 'checkpoint-2'}"
    printed = run_trainer(2, "fsdp2", tmp_path, again, fails=True, STATE_DICT_TYPE="SHARDED_STATE_DICT").report
    how = "without FSDP or DeepSpeed, or with save_only_model=True" if saved == "ddp" else f"under FSDP with {saved}"
    found = f"checkpoint-2' was saved {how}, but this run trains under FSDP with SHARDED_STATE_DICT."
    assert printed.count(f"ValueError: resume_from_checkpoint='{tmp_path}/{found}") == 2, printed
    assert ("hf-lowprec export" if saved == "ddp" else f"Set state_dict_type={saved!r} in fsdp_config") in printed


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 sharded", "llama:tp_size=2", "zero1", "zero2", "zero3"])
def test_nothing_that_a_file_holds_is_run(kind, tmp_path):
    """By no command, nor when training resumes."""
    if "zero" in kind:
        pytest.importorskip("deepspeed")
    name, *sharded = kind.split()
    words = "--optim adamw_bf16_split --save_strategy steps --save_steps 1 --max_steps 1"
    environment = {"STATE_DICT_TYPE": "SHARDED_STATE_DICT"} if sharded else {}
    run_trainer(2, name, tmp_path / "saved", words, **environment)
    again = ["2", SCRIPTS / "trainer_ranks.py", name, *words.split(), "--output_dir", tmp_path / "again"]
    for checkpoint in with_planted_files(tmp_path / "saved/checkpoint-1", tmp_path):
        for command in reading(checkpoint, checkpoint, tmp_path / "out"):
            hf_lowprec(*command)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        script = SCRIPTS / "forked_ranks.py"
        words = [*map(str, again), "--resume_from_checkpoint", str(checkpoint)]
        forkserver.run(script, words, timeout=100, **environment)


def test_shards_of_fsdp2(tmp_path):
    """The manifest lists what every rank has written."""
    run_trainer(2, "fsdp2", tmp_path, FOUR_STEPS, STATE_DICT_TYPE="SHARDED_STATE_DICT")
    last = tmp_path / "checkpoint-4"
    sizes = {path.relative_to(last).as_posix(): path.stat().st_size for path in last.rglob("*") if path.is_file()}
    del sizes[MANIFEST_NAME]
    assert json.loads((last / MANIFEST_NAME).read_text())["files"] == sizes
    for name in ("optimizer_0/.metadata", "pytorch_model_fsdp_0/__1_0.distcp", "rng_state_1.pth"):
        content = (last / name).read_bytes()
        (last / name).unlink()
        assert choose_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-2"), name
        (last / name).write_bytes(content)
    assert choose_checkpoint(True, str(tmp_path)) == str(last)


def test_each_machine_has_a_manifest_of_its_own_files(tmp_path):
    words = "--optim adamw_bf16_kahan --max_steps 1 --save_strategy steps --save_steps 1 --save_on_each_node True"
    run_trainer(2, "ddp", "out", words, MACHINES=str(tmp_path))
    for rank in (0, 1):
        checkpoint = tmp_path / f"{rank}/out/checkpoint-1"
        files = json.loads((checkpoint / MANIFEST_NAME).read_text())["files"]
        assert {*files, MANIFEST_NAME} == {*os.listdir(checkpoint)}
        assert {name for name in files if name.startswith("rng_state")} == {f"rng_state_{rank}.pth"}
