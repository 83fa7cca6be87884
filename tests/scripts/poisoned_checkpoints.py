"""Save a checkpoint, and resume from copies of it whose files create a marker when they are unpickled.

poisoned_checkpoints.py FOLDER [STATE_DICT_TYPE]: under FSDP2 with that type, else under DDP or in one process.

Prints how many copies there were, and those that created the marker.
"""

import dataclasses
import sys
from pathlib import Path

from accelerate import PartialState
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer, TrainingArguments

import hf_lowprec  # noqa: F401
from hf_lowprec.integrations.transformers.checkpoints import manifest
from tests.scripts.trainer_ranks import llama, text
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave
from tests.support.training.poisoned_files import poisons, write_poisoned


def train(out: Path, state_dict_type: str, **settings) -> Trainer:
    if state_dict_type:
        settings |= {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": state_dict_type}}
    args = TrainingArguments(
        str(out),
        optim="adamw_bf16_kahan",
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = Trainer(llama(), args, train_dataset=text(8))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    return trainer


def list_again(copy: Path, written: manifest.Manifest) -> None:
    """Write the manifest that lists the files as they are now."""
    files = manifest._records(copy, written.files)
    manifest._write(copy, dataclasses.replace(written, files=files))


def main(folder: str, state_dict_type: str = "") -> None:
    allow_fsdp_on_cpu()
    out, tried, ran = Path(folder), 0, []
    checkpoint, copy, marker = out / "checkpoint-2", out / "poisoned", out / "marker"
    assert train(out, state_dict_type).state.global_step == 2
    written = manifest.read_manifest(checkpoint)
    for name, contents in poisons(checkpoint, marker):
        tried += 1
        if PartialState().is_main_process:
            write_poisoned(checkpoint, contents, copy)
            list_again(copy, written)
        PartialState().wait_for_everyone()
        try:
            train(out / "resumed", state_dict_type, resume_from_checkpoint=str(copy))
        except (Exception, CheckpointException) as error:
            print(f"{name}: {error}")
        PartialState().wait_for_everyone()
        if PartialState().is_main_process and marker.exists():
            ran.append(name)
            marker.unlink()
    if PartialState().is_main_process:
        print(f"of {tried} poisoned files ran: {ran}")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
