"""Decides which checkpoint a run resumes from: the last good one, or the one that the user names, if it is good.

A checkpoint is good if it has a `trainer_state.json`, which Trainer writes last, and none of its files is damaged or
missing (see `damage.py`). File times are not used, since copying changes them.

All ranks reach the same decision: one process per machine checks the files that it sees, and a checkpoint that is
damaged for one is damaged for all.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils.constants import FSDP_MODEL_NAME
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_lowprec.integrations.checkpoint_files.json_files import read_json
from hf_lowprec.integrations.transformers.checkpoints import damage
from hf_lowprec.integrations.transformers.checkpoints.manifest import MANIFEST_NAME, Manifest, read_manifest
from hf_lowprec.integrations.transformers.checkpoints.trainer_state import read_trainer_state, unknown_fields
from hf_lowprec.reduction.collectives import gather_objects

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_NOT_WEIGHTS = re.compile(r"optimizer|scheduler\.pt|rng_state|scaler\.pt")
"""Files of a checkpoint that are not loaded with the best weights."""
_SHOWN = 5
"""The number of damaged files that a message names."""
_DAMAGED, _UNFINISHED, _EARLIER = "is damaged", "was not finished", "is from an earlier training run"

_on_every_rank = functools.partial(gather_objects, purpose="choosing a checkpoint")


class Problem(NamedTuple):
    """The reason why a checkpoint cannot be resumed from.

    Attributes:
        kind: `_DAMAGED`, `_UNFINISHED` or `_EARLIER`.
        reason: the details, for a message.
    """

    kind: str
    reason: str


def choose_checkpoint(
    resume_from_checkpoint: str | os.PathLike[str] | bool | None, output_dir: str
) -> str | bool | None:
    """Return what Trainer should resume from, the same on all ranks. Every rank must call it.

    Args:
        resume_from_checkpoint: as `Trainer.train` takes it. `True` stands for the last good checkpoint in `output_dir`;
            later ones that are not good are skipped, and named in a warning.
        output_dir: where the run saves its checkpoints.

    Returns:
        A path, as a string; or True, False or None, or a path where there is nothing, with which Trainer starts from
        scratch or raises its own error.

    Raises:
        ValueError: the named checkpoint is not good, or there are checkpoints but none is good; the message names the
            damaged files. Or it is the output folder of a run. Or the ranks name different checkpoints, or not all of
            them see the checkpoint.
    """
    if isinstance(resume_from_checkpoint, os.PathLike):
        resume_from_checkpoint = os.fspath(resume_from_checkpoint)
    asked = _on_every_rank(resume_from_checkpoint if resume_from_checkpoint else None)
    if any(other != asked[0] for other in asked):
        raise ValueError(f"resume_from_checkpoint differs between ranks: {asked}; pass the same value on all ranks")
    if not resume_from_checkpoint:
        return resume_from_checkpoint
    if resume_from_checkpoint is True:
        chosen = _last_good(Path(output_dir))
        if chosen is None:
            return resume_from_checkpoint  # Trainer raises an error
    else:
        chosen = Path(resume_from_checkpoint)
        if not any(_on_every_rank(chosen.is_dir())):
            return resume_from_checkpoint  # as above
        _check_not_a_run(chosen)
        _check_named(chosen, Path(output_dir))
    _check_seen(chosen)
    _warn_of_incomplete_state(chosen)
    _warn_of_missing_files(chosen)
    return str(chosen)


def check_state_dict_type(checkpoint: Path, wanted: str | None) -> None:
    """Raise ValueError unless the checkpoint holds the model as checkpoints of this run do.

    Args:
        checkpoint: the folder.
        wanted: FSDP's state dict type; None without FSDP.
    """
    if (checkpoint / f"{FSDP_MODEL_NAME}_0").is_dir():
        found = "SHARDED_STATE_DICT"
    elif (checkpoint / f"{FSDP_MODEL_NAME}.bin").exists():
        found = "FULL_STATE_DICT"
    else:
        found = None
    if found == wanted:
        return
    saved = "without FSDP or with save_only_model=True" if found is None else f"under FSDP with {found}"
    if found is None or wanted is None:
        way_out = (
            "Resume it that way, or begin a new run with its weights: hf-lowprec export CHECKPOINT FOLDER writes them, "
            "with compensations and remainders, and from_pretrained(FOLDER) loads them"
        )
    else:
        way_out = f"Set state_dict_type={found!r} in fsdp_config (fsdp_state_dict_type in accelerate's configuration)"
    raise ValueError(
        f"resume_from_checkpoint={str(checkpoint)!r} was saved {saved}, but this run trains "
        f"{'without FSDP' if wanted is None else f'under FSDP with {wanted}'}. {way_out}"
    )


def check_good(checkpoint: Path, argument: str = "checkpoint") -> None:
    """Check a checkpoint of Trainer that is to be exported or inspected.

    Args:
        checkpoint: the folder.
        argument: the argument that it was passed as, for the message.

    Raises:
        ValueError: it was not saved completely, or files are damaged. The message names them.
    """
    _check_named(checkpoint, checkpoint.parent, argument)


def check_best(checkpoint: Path) -> None:
    """Check the weights of the best checkpoint, before Trainer loads them at the end of a run.

    Raises:
        ValueError: files are unsafe, or have changed since they were written. The message names them.
    """
    for damaged in filter(None, _read_on_ranks(lambda: _changed_weights(checkpoint), _checks_here())):
        raise ValueError(
            f"load_best_model_at_end=True: {str(checkpoint)!r}, the best checkpoint, {_DAMAGED}: {_listing(damaged)}; "
            "training has finished, and the final weights are in the last checkpoint"
        )


def _changed_weights(checkpoint: Path) -> list[str]:
    """A line for every file that is loaded with the best weights, and is damaged."""
    manifest = _manifest_or_none(checkpoint)
    if manifest is not None:
        files = {name: record for name, record in manifest.files.items() if not _NOT_WEIGHTS.match(name)}
        manifest = dataclasses.replace(manifest, files=files)
    return [line for line in damage.damaged_files(checkpoint, manifest) if not _NOT_WEIGHTS.match(line)]


def manifest_of(chosen: str | bool | None) -> Manifest | None:
    """The manifest of what `choose_checkpoint` has returned; None without a manifest or a checkpoint."""
    return None if not chosen or chosen is True else read_manifest(Path(chosen))


def _read_on_ranks(read: Callable[[], Any], here: bool) -> list[Any]:
    """Call `read` on some ranks, and exchange the results.

    Args:
        read: returns an object that pickles.
        here: whether this rank calls it.

    Returns:
        The results in rank order, None for ranks that have not called it.

    Raises:
        ValueError: `read` raised on some rank. Raised on every rank, because the others would wait forever otherwise.
    """
    error = None
    try:
        value = read() if here else None
    except Exception as failure:  # the other ranks must be told of any exception
        value, error = None, f"{type(failure).__name__}: {failure}"
    answers = _on_every_rank((value, error))
    for rank, (_, error) in enumerate(answers):
        if error is not None:
            raise ValueError(f"rank {rank} cannot read the checkpoints: {error}")
    return [value for value, _ in answers]


def _last_good(folder: Path) -> Path | None:
    """The last good checkpoint, with a warning about those that were skipped; None if there are no checkpoints.

    Raises:
        ValueError: there are checkpoints, and none is good.
    """
    good, skipped = _search(folder)
    if not skipped:
        return good
    kinds = ", ".join(f"{name} {problem.kind}" for name, problem in skipped.items())
    reasons = "; ".join(f"{name}: {problem.reason}" for name, problem in skipped.items())
    if good is None:
        raise ValueError(
            f"no checkpoint in {str(folder)!r} is complete and intact ({reasons}); start again without "
            "resume_from_checkpoint, or pass the path of another checkpoint"
        )
    _warn("%s; resuming from %s (%s)", kinds, good, reasons)
    return good


def _check_named(checkpoint: Path, output_dir: Path, argument: str = "resume_from_checkpoint") -> None:
    """Raise ValueError, suggesting an alternative, if the checkpoint that the user names as `argument` is not good."""
    problem = _problem(checkpoint)
    if problem is None:
        return
    numbered = _CHECKPOINT.match(checkpoint.name) is not None
    good, _ = _search(checkpoint.parent if numbered else output_dir)
    way_out = "pass another one" if good is None else f"pass {str(good)!r}, the last good one, or another"
    if problem.kind == _DAMAGED and (checkpoint / MANIFEST_NAME).exists():
        way_out += f" (if the files were changed on purpose, delete its {MANIFEST_NAME})"
    raise ValueError(f"{argument}={str(checkpoint)!r} {problem.kind}: {problem.reason}; {way_out}")


def _check_not_a_run(folder: Path) -> None:
    """Raise ValueError, naming the last good checkpoint, if `folder` has checkpoints instead of an optimizer state."""
    if any(_on_every_rank(damage.holds_optimizer(folder))):
        return
    good, _ = _search(folder)
    if good is not None:
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} is the output folder of a run and has no optimizer state; pass "
            f"{str(good)!r}, its last good checkpoint"
        )


def _check_seen(checkpoint: Path) -> None:
    """Raise ValueError if the checkpoint does not exist on every rank's machine."""
    missing_on = [rank for rank, sees in enumerate(_on_every_rank(checkpoint.is_dir())) if not sees]
    if missing_on:
        raise ValueError(
            f"rank {', '.join(map(str, missing_on))} does not see {str(checkpoint)!r}, from which the others resume; "
            "put output_dir on storage shared by all machines, or save with save_on_each_node=True"
        )


def _warn_of_incomplete_state(checkpoint: Path) -> None:
    """Warn of what is not restored: optimizer and random states, and fields that are unknown to this Trainer."""
    if not damage.holds_optimizer(checkpoint):
        _warn(
            "%s contains no optimizer state (save_only_model=True does not save it): training continues with fresh "
            "moments and without compensation, and the learning rate schedule starts over",
            checkpoint,
        )
    elif not damage.holds_random_states(checkpoint):
        _warn(
            "%s contains no random states: dropout and the order of batches will differ from the original run",
            checkpoint,
        )
    unknown = unknown_fields(read_json(checkpoint / TRAINER_STATE_NAME))
    if unknown:
        _warn(
            "%s of %s was written by another version of transformers; ignored fields: %s",
            TRAINER_STATE_NAME,
            checkpoint,
            ", ".join(unknown),
        )


def _warn_of_missing_files(checkpoint: Path) -> None:
    """Warn about missing files that resuming does not need. Missing files that it needs have already raised."""
    manifest = _manifest_or_none(checkpoint) if _is_first() else None
    if manifest is not None and (missing := [*damage.missing_files(checkpoint, manifest)]):
        _warn("%s has lost files that are not needed to resume: %s", checkpoint, _listing(missing))


def _search(folder: Path) -> tuple[Path | None, dict[str, Problem]]:
    """The last good checkpoint in `folder` (None if there is none), and the problems of later ones by name."""
    skipped: dict[str, Problem] = {}
    for name, problem in _read_on_ranks(lambda: _candidates(folder), _is_first())[0]:
        problem = problem or _problem(folder / name)
        if problem is None:
            return folder / name, skipped
        skipped[name] = problem
    return None, skipped


def _candidates(folder: Path) -> list[tuple[str, Problem | None]]:
    """The names of the checkpoints, highest step first, each with a problem if it is from an earlier run.

    A run that starts again in the same folder, or from an earlier step, overwrites the checkpoints one by one. Those
    that it has not reached yet have higher steps, and must not be mistaken for its own.
    """
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    names = sorted(filter(_CHECKPOINT.match, names), key=_step, reverse=True)
    manifests = {name: manifest for name in names if (manifest := _manifest_or_none(folder / name)) is not None}
    newest = max(manifests, key=lambda name: manifests[name].saved, default="")
    candidates: list[tuple[str, Problem | None]] = [(name, None) for name in names]
    for k, name in enumerate(names):
        if name not in manifests:
            continue
        saved = manifests[name].saved
        overtaken = any(manifests[other].saved > saved for other in names[k + 1 :] if other in manifests)
        if overtaken or manifests[name].run != manifests[newest].run:
            reason = f"saved at {saved} by an earlier training run, before {newest}; pass its path to use it"
            candidates[k] = (name, Problem(_EARLIER, reason))
    return candidates


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _manifest_or_none(checkpoint: Path) -> Manifest | None:
    try:
        return read_manifest(checkpoint)
    except ValueError:
        return None


def _problem(checkpoint: Path) -> Problem | None:
    """The first problem that any machine finds in a checkpoint; None if all can resume from it."""
    problems = _read_on_ranks(lambda: _problem_here(checkpoint) if checkpoint.is_dir() else None, _checks_here())
    for rank, problem in enumerate(problems):
        if problem is not None:
            return problem if rank == 0 else Problem(problem.kind, f"{problem.reason} (as rank {rank} sees it)")
    return None


def _problem_here(checkpoint: Path) -> Problem | None:
    """The problem that this machine finds in a checkpoint, or None."""
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        return Problem(_DAMAGED, str(error))
    if manifest is None or not manifest.complete:
        try:
            read_trainer_state(checkpoint / TRAINER_STATE_NAME)
        except ValueError as error:
            return Problem(_UNFINISHED, str(error))
    damaged = damage.damaged_files(checkpoint, manifest)
    if not damaged:
        return None
    return Problem(_DAMAGED if manifest is None or manifest.complete else _UNFINISHED, _listing(damaged))


def _listing(files: list[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(files[:_SHOWN]) + more


def _checks_here() -> bool:
    """Return whether this process checks files; one process per machine does."""
    return not _several_ranks() or PartialState().is_local_main_process


def _is_first() -> bool:
    return not _several_ranks() or dist.get_rank() == 0


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _warn(message: str, *arguments: object) -> None:
    if _is_first():
        logger.warning(message, *arguments)
