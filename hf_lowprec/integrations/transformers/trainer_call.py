"""Shared by the wrappers of Trainer's methods: the wrapped call, and the data that this package keeps on a Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_lowprec.integrations.transformers.callback import LowPrecisionCallback

_ATTRIBUTE = "_hf_lowprec"
"""The Trainer's attribute that holds its `Attachment`."""


class TrainerCall:
    """A call of a wrapped method of `trainer`.

    Attributes:
        trainer: the Trainer whose method is called.
        arguments: the arguments by name. Changes made here reach the method.

    Args:
        original: the method, which may be one that another library has put in place of Trainer's.
        positions: the names of its positional arguments.
        trainer: see above.
        args: the positional arguments of the call, without the Trainer.
        kwargs: its keyword arguments.
    """

    def __init__(
        self, original: Callable, positions: list[str], trainer: Trainer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._original, self._args, self._kwargs = original, args, kwargs
        self._positions = positions[: len(args)]
        self.trainer = trainer
        self.arguments = kwargs | dict(zip(positions, args, strict=False))

    def proceed(self) -> Any:
        """Call the original method: by position what was given by position, and by name what was given twice."""
        positional = [self.arguments[name] for name in self._positions]
        named = {name: value for name, value in self.arguments.items() if name not in self._positions}
        return self._original(self.trainer, *positional, *self._args[len(positional) :], **self._kwargs | named)

    @property
    def attachment(self) -> Attachment:
        """The `Attachment` of the Trainer, which must be one of ours."""
        attachment = attachment_of(self.trainer)
        assert attachment is not None
        return attachment


@dataclasses.dataclass
class Attachment:
    """The data that this package keeps on a Trainer.

    Attributes:
        callback: the callback that the Trainer was built with.
        saves_checkpoint: whether it is saving a checkpoint.
        saved: the checkpoint that it has saved, until its callbacks have run.
    """

    callback: LowPrecisionCallback
    saves_checkpoint: bool = False
    saved: Path | None = None


def attach(trainer: Trainer, callback: LowPrecisionCallback) -> None:
    """Make `trainer` one of ours."""
    setattr(trainer, _ATTRIBUTE, Attachment(callback))


def attachment_of(trainer: Trainer) -> Attachment | None:
    """The `Attachment` of `trainer`; None if it is not one of ours."""
    return getattr(trainer, _ATTRIBUTE, None)
