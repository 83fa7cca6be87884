"""Trains replicas: one loop for all experiments, which goes on where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.evidence.harness import Workspace
from benchmarks.evidence.training.modes import Mode


@dataclass
class Training:
    """Training of `model` in a mode, with a rate for each step.

    Attributes:
        work: of the experiment.
        case: the name of checkpoints.
        mode: the way to train.
        model: a module of several seeds in FP32, which `mode` casts; `losses(batch)` gives the loss of each.
        batches: data of all seeds: `of_step(step)`, and `validation()`, which gives batches and their numbers of rows.
        rate: gives the learning rate of a step.
        options: of the optimizer, see `Mode.optimizer`.
        kept: how many of the last steps leave the losses of their batches in `losses`.
    """

    work: Workspace
    case: str
    mode: Mode
    model: Any
    batches: Any
    rate: Callable[[int], float]
    options: dict[str, Any] = field(default_factory=lambda: {"weight_decay": 0.1})
    kept: int = 0

    def __post_init__(self) -> None:
        self.model.to(self.work.device)
        self.optimizer = self.mode.optimizer(self.model, lr=self.rate(0), **self.options)
        self.step, self.points, self.losses = 0, list[dict[str, Any]](), list[Tensor]()

    def load(self, case: str) -> bool:
        """Take model, optimizer, step and points from the last checkpoint of `case`; False if there is none."""
        saved = self.work.load(case)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.points, self.losses = saved["step"], saved["points"], saved["losses"]
        return saved is not None

    def run(
        self, last: int, records: Collection[int] = (), observe: Callable[[], object] = lambda: None
    ) -> list[dict[str, Any]]:
        """Train until `last` steps are done, and leave a checkpoint.

        Args:
            last: the number of steps.
            records: numbers of steps after which the validation loss is taken; it is also taken after the last.
            observe: is called then.

        Returns:
            A dictionary for each number of steps with `step` and `loss`, the losses of all seeds.
        """
        while self.step < last:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(self.step)
            with self.mode.precision(self.work.device):
                losses = self.model.losses(on_device_of(self.model, self.batches.of_step(self.step)))
            losses.sum().backward()
            if self.step >= last - self.kept:
                self.losses.append(losses.detach())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.step in records or self.step == last:
                found = self.validation()
                self.points.append({"step": self.step, "loss": found.tolist()})
                observe()
                words = f"step {self.step}, loss {float(found.mean()):.4f} ± {float(found.std(correction=0)):.4f}"
                self.work.progress(f"{self.case}: {words}")
            if self.work.is_due() or self.step == last:
                state = {"step": self.step, "points": self.points, "losses": self.losses}
                models = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                self.work.save(self.case, {**state, **models})
        return self.points

    def validation(self) -> Tensor:
        """See `validation`; in the mode's precision."""
        with self.mode.precision(self.work.device):
            return validation(self.model, self.batches)


@torch.no_grad()
def validation(model: Any, batches: Any) -> Tensor:
    """The mean loss of each seed on what is held out, FP64."""
    parts = [(model.losses(on_device_of(model, batch)).double().cpu(), rows) for batch, rows in batches.validation()]
    return sum(losses * rows for losses, rows in parts) / sum(rows for _, rows in parts)


def on_device_of(model: Any, batch: Tensor | tuple[Tensor, ...]) -> Any:
    """A batch where the model is."""
    device = next(model.parameters()).device
    return batch.to(device) if isinstance(batch, Tensor) else tuple(part.to(device) for part in batch)
