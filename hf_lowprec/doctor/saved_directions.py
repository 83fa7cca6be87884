"""The directions of a run's updates, from the moments in its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.diagnostics.parameter_kinds import parameter_kinds
from hf_lowprec.doctor.update_sizes import ALL, SAMPLE
from hf_lowprec.integrations.checkpoint_files.stored_tensors import ShardedFolder, StoredTensors, load_mapped
from hf_lowprec.integrations.export.parameter_names import read_parameter_names

_FILES = ("optimizer.pt", "optimizer.bin")
_SHARDED = "optimizer_0"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class SavedMoments(NamedTuple):
    """The moments of one parameter.

    Attributes:
        name: its name; None if the checkpoint only numbers it.
        step: how many steps it has taken.
        betas: decay rates.
        eps: added to the root of the second moment.
        parameters: the number of its elements.
        read: reads both moments.
    """

    name: str | None
    step: int
    betas: tuple[float, float]
    eps: float
    parameters: int
    read: Callable[[], tuple[Tensor, Tensor]]

    def directions(self, count: int) -> Tensor:
        """`|m̂|/(√v̂ + eps)` of `count` evenly spaced elements (FP64)."""
        positions = torch.arange(count) * self.parameters // count
        first, second = (
            moment.reshape(-1)[positions].double() / (1 - beta**self.step)
            for moment, beta in zip(self.read(), self.betas, strict=True)
        )
        return first.abs() / (second.sqrt() + self.eps)


@torch.no_grad()
def saved_directions(folder: Path, weights: StoredTensors) -> dict[str, Tensor]:
    """Sample the directions of a checkpoint with Adam's moments, by kind.

    Args:
        folder: the checkpoint.
        weights: its weights.

    Returns:
        About `SAMPLE` directions or more for each kind of which moments are found, and for "all"; parameters have
        shares in proportion to their size. Empty for a folder without moments.
    """
    kinds = parameter_kinds({name: info.shape for name, info in weights.infos.items()})
    saved = [moments for moments in _saved_moments(folder) if moments.step > 0]
    groups: dict[str, list[SavedMoments]] = {ALL: saved} if saved else {}
    for moments in saved:
        if moments.name in kinds:
            groups.setdefault(kinds[moments.name], []).append(moments)
    directions = {}
    for kind, members in groups.items():
        total = sum(moments.parameters for moments in members)
        counts = [min(moments.parameters, -(-SAMPLE * moments.parameters // total)) for moments in members]
        directions[kind] = torch.cat([m.directions(count) for m, count in zip(members, counts, strict=True)])
    return directions


def _saved_moments(folder: Path) -> Iterator[SavedMoments]:
    for file in _FILES:
        if (folder / file).is_file():
            return _moments_in_file(folder, folder / file)
    if (folder / _SHARDED).is_dir():
        return _moments_in_folder(ShardedFolder(folder / _SHARDED))
    return iter(())


def _moments_in_file(folder: Path, path: Path) -> Iterator[SavedMoments]:
    saved = load_mapped(path)
    parameters = read_parameter_names(folder)
    for position, group in enumerate(saved["param_groups"]):
        names = parameters.optimizers[0][position] if parameters else [None] * len(group["params"])
        for key, name in zip(group["params"], names, strict=True):
            state = saved["state"].get(key, {})
            if all(moment in state for moment in _MOMENTS):
                moments = tuple(state[moment] for moment in _MOMENTS)
                name = key if isinstance(key, str) else name
                yield _saved(name, group, state["step"], moments[0].numel(), partial(_same, moments))


def _same(moments: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return moments


def _moments_in_folder(stored: ShardedFolder) -> Iterator[SavedMoments]:
    paths = set(stored.paths())
    positions = sorted({path[2] for path in paths if path[:2] == ("optimizer", "param_groups") and len(path) == 4})
    for position in positions:
        group = {key: stored.read(("optimizer", "param_groups", position, key)) for key in ("params", "betas", "eps")}
        for name in group["params"]:
            moments = [("optimizer", "state", name, moment) for moment in _MOMENTS]
            info = stored.info(moments[0]) if paths.issuperset(moments) else None
            if info is not None:
                step = stored.read(("optimizer", "state", name, "step"))
                yield _saved(name, group, step, info.shape.numel(), partial(_read_both, stored, moments))


def _read_both(stored: ShardedFolder, moments: list[tuple[Any, ...]]) -> tuple[Tensor, Tensor]:
    first, second = map(stored.read, moments)
    return first, second


def _saved(
    name: str | None, group: Mapping[str, Any], step: Any, parameters: int, read: Callable[[], tuple[Tensor, Tensor]]
) -> SavedMoments:
    return SavedMoments(name, int(step), tuple(group["betas"]), float(group["eps"]), parameters, read)
