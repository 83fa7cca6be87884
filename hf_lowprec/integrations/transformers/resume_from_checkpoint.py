"""Which checkpoint a training is resumed from: the last good one, or the one that was named, if it is good.

A checkpoint with a manifest is good if its files are those that were written (`checkpoint_manifest.py`), one
without, of another Trainer, if the files that Trainer loads open (`checkpoint_structure.py`). The times of files say
nothing: copying changes them.

Several ranks agree: one process of every machine checks what it sees there, and what is damaged for one is for all.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from accelerate import PartialState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_lowprec.integrations.transformers import checkpoint_structure
from hf_lowprec.integrations.transformers.checkpoint_manifest import (
    MANIFEST_NAME,
    Manifest,
    changed_files,
    missing_files,
    read_json,
    read_manifest,
)
from hf_lowprec.reduction.settings import on_every_rank

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_OPTIMIZER = re.compile(r"optimizer|scheduler\.pt|rng_state|scaler\.pt")
_MANY = 5
"""Damaged files that a message names."""
_DAMAGED, _UNFINISHED, _EARLIER = "is damaged", "was not finished", "is of an earlier training"

_on_every_rank = functools.partial(on_every_rank, purpose="choosing a checkpoint")


class Problem(NamedTuple):
    """Why a checkpoint cannot be resumed from."""

    kind: str  # one of the three above
    reason: str


def resolve(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | bool | None:
    """What Trainer should resume from, given what it was asked to; the same on all ranks.

    For `True` it is the last good checkpoint in `output_dir`. Later ones that are not good are skipped, and named
    in a warning.

    Raises:
        ValueError: a checkpoint was named that is not good, or there are checkpoints and none is; the message names the
            damaged files. Or ranks ask for different ones, or do not all see it.
    """
    _read_manifest.cache_clear()
    asked = _on_every_rank(resume_from_checkpoint if resume_from_checkpoint else None)
    if any(other != asked[0] for other in asked):
        raise ValueError(f"resume_from_checkpoint differs between ranks: {asked}; give all of them the same")
    if not resume_from_checkpoint:
        return resume_from_checkpoint
    if resume_from_checkpoint is True:
        chosen = _last_good(Path(output_dir))
        if chosen is None:
            return resume_from_checkpoint  # Trainer says that there is none
    else:
        chosen = Path(resume_from_checkpoint)
        if not any(_on_every_rank(chosen.is_dir())):
            return resume_from_checkpoint  # as above
        _check_named(chosen, Path(output_dir))
    _check_seen(chosen)
    _warn_of_missing_state(chosen)
    _warn_of_missing_files(chosen)
    return str(chosen) if resume_from_checkpoint is True else resume_from_checkpoint


def last_complete(output_dir: Path) -> Path | None:
    """The good checkpoint of the highest step in `output_dir`, or None."""
    _read_manifest.cache_clear()
    return _search(output_dir)[0]


def check_best(checkpoint: Path) -> None:
    """Check what is loaded of the best checkpoint when training ends; the optimizer's files do not matter.

    Raises:
        ValueError: files are not what was written; the message names them.
    """
    _read_manifest.cache_clear()
    for damaged in filter(None, _read_on_ranks(lambda: _changed_weights(checkpoint), _checks_here())):
        raise ValueError(
            f"load_best_model_at_end=True: {str(checkpoint)!r}, the best checkpoint, {_DAMAGED}: {_listed(damaged)}; "
            "training has finished, and its last checkpoint has the last weights"
        )


def _changed_weights(checkpoint: Path) -> list[str]:
    manifest = _manifest_or_none(checkpoint)
    if manifest is None:
        return []
    files = {name: record for name, record in manifest.files.items() if not _OPTIMIZER.match(name)}
    return changed_files(checkpoint, dataclasses.replace(manifest, files=files))


def manifest_of(resolved: str | bool | None) -> Manifest | None:
    """The manifest of what `resolve` has returned, None if there is none."""
    return None if not resolved or resolved is True else _read_manifest(Path(resolved))


def _read_on_ranks(read: Callable[[], Any], here: bool) -> list[Any]:
    """What `read` returns on the ranks where it runs `here`, in rank order, and None for the others.

    Raises:
        ValueError: on every rank, if `read` fails on one: the others do not wait for it.
    """
    error = None
    try:
        value = read() if here else None
    except Exception as failure:  # whatever it is, the other ranks must hear of it
        value, error = None, f"{type(failure).__name__}: {failure}"
    answers = _on_every_rank((value, error))
    for rank, (_, error) in enumerate(answers):
        if error is not None:
            raise ValueError(f"rank {rank} cannot read the checkpoints: {error}")
    return [value for value, _ in answers]


def _last_good(folder: Path) -> Path | None:
    """The last good checkpoint, with a warning for those skipped; None if there are no checkpoints at all."""
    good, skipped = _search(folder)
    if not skipped:
        return good
    kinds = ", ".join(f"{name} {problem.kind}" for name, problem in skipped.items())
    reasons = "; ".join(f"{name}: {problem.reason}" for name, problem in skipped.items())
    if good is None:
        raise ValueError(
            f"no checkpoint in {str(folder)!r} was finished and is intact ({reasons}); start again without "
            "resume_from_checkpoint, or name a checkpoint elsewhere"
        )
    _warn("%s; resuming from %s (%s)", kinds, good, reasons)
    return good


def _check_named(checkpoint: Path, output_dir: Path) -> None:
    problem = _problem(checkpoint)
    if problem is None:
        return
    numbered = _CHECKPOINT.match(checkpoint.name) is not None
    good, _ = _search(checkpoint.parent if numbered else output_dir)
    way_out = "name another one" if good is None else f"name {str(good)!r}, the last good one, or another"
    if problem.kind == _DAMAGED and (checkpoint / MANIFEST_NAME).exists():
        way_out += f" (if the files were changed on purpose, delete its {MANIFEST_NAME})"
    raise ValueError(f"resume_from_checkpoint={str(checkpoint)!r} {problem.kind}: {problem.reason}; {way_out}")


def _check_seen(checkpoint: Path) -> None:
    missing_on = [rank for rank, sees in enumerate(_on_every_rank(checkpoint.is_dir())) if not sees]
    if missing_on:
        raise ValueError(
            f"rank {', '.join(map(str, missing_on))} does not see {str(checkpoint)!r}, from which the others resume; "
            "put output_dir on storage that all machines share, or save with save_on_each_node=True"
        )


def _warn_of_missing_state(checkpoint: Path) -> None:
    if not checkpoint_structure.holds_optimizer(checkpoint):
        _warn(
            "%s holds no optimizer state (save_only_model=True does not save any): training goes on with fresh "
            "moments, without compensation, and the learning rate's schedule begins again",
            checkpoint,
        )
    elif not checkpoint_structure.holds_random_states(checkpoint):
        _warn("%s holds no random states: dropout and the order of batches are not those of the training", checkpoint)
    unknown = checkpoint_structure.unknown_fields(read_json(checkpoint / TRAINER_STATE_NAME))
    if unknown:
        _warn(
            "%s of %s is of another version of transformers; left out: %s",
            TRAINER_STATE_NAME,
            checkpoint,
            ", ".join(unknown),
        )


def _warn_of_missing_files(checkpoint: Path) -> None:
    manifest = _manifest_or_none(checkpoint) if _is_first() else None
    if manifest is not None and (gone := [*missing_files(checkpoint, manifest)]):
        _warn("%s was saved with files that are gone, and are not needed to resume: %s", checkpoint, _listed(gone))


def _search(folder: Path) -> tuple[Path | None, dict[str, Problem]]:
    """The last good checkpoint in `folder`, and why the later ones are not."""
    skipped: dict[str, Problem] = {}
    for name, problem in _read_on_ranks(lambda: _candidates(folder), _is_first())[0]:
        problem = problem or _problem(folder / name)
        if problem is None:
            return folder / name, skipped
        skipped[name] = problem
    return None, skipped


def _candidates(folder: Path) -> list[tuple[str, Problem | None]]:
    """The names of the checkpoints, latest first, with a problem for those that the last training did not go through.

    A training that begins again in the same folder, or from an earlier step, overwrites checkpoints one by one. Those
    that it has not reached yet are of higher steps, and would be taken for its own.
    """
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    names = sorted(filter(_CHECKPOINT.match, names), key=_step, reverse=True)
    manifests = {name: manifest for name in names if (manifest := _manifest_or_none(folder / name)) is not None}
    newest = max(manifests, key=lambda name: manifests[name].saved, default="")
    found: list[tuple[str, Problem | None]] = [(name, None) for name in names]
    for at, name in enumerate(names):
        if name not in manifests:
            continue
        saved = manifests[name].saved
        overtaken = any(manifests[other].saved > saved for other in names[at + 1 :] if other in manifests)
        if overtaken or manifests[name].run != manifests[newest].run:
            reason = f"saved at {saved} by a previous training, before {newest}; pass its path to use it"
            found[at] = (name, Problem(_EARLIER, reason))
    return found


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


@functools.cache
def _read_manifest(checkpoint: Path) -> Manifest | None:
    """As `read_manifest`, once; the public functions that look for checkpoints begin with an empty cache."""
    return read_manifest(checkpoint)


def _manifest_or_none(checkpoint: Path) -> Manifest | None:
    try:
        return _read_manifest(checkpoint)
    except ValueError:
        return None


def _problem(checkpoint: Path) -> Problem | None:
    """What is wrong with a checkpoint on any machine."""
    found = _read_on_ranks(lambda: _problem_here(checkpoint) if checkpoint.is_dir() else None, _checks_here())
    for rank, problem in enumerate(found):
        if problem is not None:
            return problem if rank == 0 else Problem(problem.kind, f"{problem.reason} (as rank {rank} sees it)")
    return None


def _problem_here(checkpoint: Path) -> Problem | None:
    try:
        manifest = _read_manifest(checkpoint)
    except ValueError as error:
        return Problem(_DAMAGED, str(error))
    if manifest is None:
        try:
            checkpoint_structure.read_trainer_state(checkpoint / TRAINER_STATE_NAME)
        except ValueError as error:
            return Problem(_UNFINISHED, str(error))
        damaged = checkpoint_structure.damaged_files(checkpoint)
    elif not manifest.complete:
        return Problem(_UNFINISHED, f"{MANIFEST_NAME} says that it was still being written")
    else:
        damaged = changed_files(checkpoint, manifest)
    if not damaged:
        return None
    return Problem(_DAMAGED, _listed(damaged))


def _listed(damaged: list[str]) -> str:
    more = f" and {len(damaged) - _MANY} more" if len(damaged) > _MANY else ""
    return ", ".join(damaged[:_MANY]) + more


def _checks_here() -> bool:
    """Whether this process is the one of its machine that reads files."""
    return not _several_ranks() or PartialState().is_local_main_process


def _is_first() -> bool:
    return not _several_ranks() or dist.get_rank() == 0


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _warn(message: str, *arguments: object) -> None:
    if _is_first():
        logger.warning(message, *arguments)
