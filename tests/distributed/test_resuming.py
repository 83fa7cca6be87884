"""Several ranks resume from the same checkpoint, one that is intact for all of them."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_lowprec.integrations.transformers.checkpoints.manifest import MANIFEST_NAME
from hf_lowprec.integrations.transformers.checkpoints.resume import choose_checkpoint
from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

NOT_NEEDED = ("generation_config.json", "hf_lowprec_parameters.json")
"""Files that no Trainer reads when it resumes; their loss is only worth a warning."""


def machines(folder: Path) -> Path:
    """Two folders, with checkpoints of steps 2 and 4 in each."""
    for rank, step in itertools.product((0, 1), (2, 4)):
        checkpoint = folder / f"{rank}/out/checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        save_file({"weight": torch.zeros(8)}, checkpoint / "model.safetensors")
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step, "train_batch_size": 8}))
    return folder


def test_machines_that_see_different_files(tmp_path):
    """All ranks resume from the same checkpoint, one that is intact on all of them, or all raise the same error."""
    damaged, partial = machines(tmp_path / "damaged"), machines(tmp_path / "partial")
    weights = damaged / "1/out/checkpoint-4/model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    shutil.rmtree(partial / "1/out/checkpoint-4")
    expected = {
        (damaged, True): r"out/checkpoint-2$",
        (damaged, "out/checkpoint-4"): r"ValueError: .*'out/checkpoint-4' is damaged: model.safetensors .*"
        r"\(as rank 1 sees it\); pass 'out/checkpoint-2', the last good one",
        (damaged, True, "out/checkpoint-2"): r"ValueError: .* differs between ranks: \[True, 'out/checkpoint-2'\]",
        (partial, True): r"ValueError: rank 1 does not see 'out/checkpoint-4'.*save_on_each_node=True",
        (partial, "out/checkpoint-4"): r"ValueError: rank 1 does not see 'out/checkpoint-4'",
        (partial, "out/checkpoint-2"): r"out/checkpoint-2$",
        (partial, "hub/name"): r"hub/name$",
    }
    questions = json.dumps([[str(folder), *asked] for folder, *asked in expected])
    printed = run_ranks("resolved_on_ranks.py", 2, questions)
    for number, answer in enumerate(expected.values()):
        for rank in (0, 1):
            assert re.search(rf"answer {number} of rank {rank}: {answer}", printed, re.MULTILINE), printed


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    machines(tmp_path)
    assert "both ranks raise" in run_ranks("unreadable_checkpoints.py", 2, str(tmp_path / "0/out"))


@pytest.mark.parametrize("saved", ["ddp", "FULL_STATE_DICT"])
def test_a_checkpoint_that_holds_the_model_in_another_way(tmp_path, saved):
    """accelerate raises FileNotFoundError on one rank, and the other waits for it."""
    words = (
        "--optim adamw_bf16_kahan --max_steps 4 --save_strategy steps --save_steps 2 --per_device_train_batch_size 2"
    )
    words += f" --output_dir {tmp_path}"
    run_ranks("trainer_ranks.py", 2, "ddp" if saved == "ddp" else "fsdp2", *words.split(), STATE_DICT_TYPE=saved)
    again = ["--resume_from_checkpoint", str(tmp_path / "checkpoint-2")]
    sharded = {"STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    printed = run_ranks("trainer_ranks.py", 2, "fsdp2", *words.split(), *again, **sharded, fails=True)
    how = "without FSDP or with save_only_model=True" if saved == "ddp" else f"under FSDP with {saved}"
    found = f"checkpoint-2' was saved {how}, but this run trains under FSDP with SHARDED_STATE_DICT."
    assert printed.count(f"ValueError: resume_from_checkpoint='{tmp_path}/{found}") == 2, printed
    assert ("hf-lowprec export" if saved == "ddp" else f"Set state_dict_type={saved!r} in fsdp_config") in printed


def test_shards_of_fsdp2(tmp_path):
    """Damage to every file of a sharded checkpoint is found, and without a manifest as much as can be seen."""
    words = "--max_steps 4 --save_strategy steps --save_steps 2 --per_device_train_batch_size 2 --learning_rate 1e-2"
    sharded = json.dumps({"version": 2, "state_dict_type": "SHARDED_STATE_DICT"})
    options = ["--optim", "adamw_bf16_kahan", "--fsdp_config", sharded, "--output_dir", str(tmp_path)]
    run_ranks("trainer_ranks.py", 2, "fsdp2", *words.split(), *options)
    last = tmp_path / "checkpoint-4"
    manifest = json.loads((last / MANIFEST_NAME).read_text())
    files = {path.relative_to(last).as_posix() for path in last.rglob("*") if path.is_file()} - {MANIFEST_NAME}
    shards = {
        f"{folder}/{name}" for folder in ("optimizer_0", "pytorch_model_fsdp_0") for name in os.listdir(last / folder)
    }
    assert manifest["files"].keys() == files >= shards
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= {Path(name).name for name in shards}
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= files

    def seen(name: str) -> None:
        with pytest.raises(ValueError, match=f"checkpoint-4' is damaged: .*{name}.*checkpoint-2'"):
            choose_checkpoint(str(last), str(tmp_path))

    for stock in (False, True):
        if stock:
            (last / MANIFEST_NAME).unlink()
        assert choose_checkpoint(str(last), str(tmp_path)) == str(last)
        for name in sorted(shards if stock else files):
            path = last / name
            content = path.read_bytes()
            changed = [b"", content[: len(content) // 2]]
            if not stock:
                changed.append(bytes([*content[:-9], content[-9] ^ 16, *content[-8:]]))
            for damaged in changed:
                path.write_bytes(damaged)
                seen(name)
            path.unlink()
            if name in NOT_NEEDED:
                assert choose_checkpoint(str(last), str(tmp_path)) == str(last)
            else:
                seen(name)
            path.write_bytes(content)
