"""Shared by the wrappers of Trainer's methods: the wrapped call, and the data that this package keeps on a Trainer."""

from __future__ import annotations

import dataclasses
import inspect
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
        arguments: the arguments by name, including `self`. Changes made here reach the method.
    """

    def __init__(self, original: Callable, trainer: Trainer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original = original
        self._bound = inspect.signature(original).bind(trainer, *args, **kwargs)
        self.trainer = trainer
        self.arguments = self._bound.arguments

    def proceed(self) -> Any:
        """Call Trainer's original method."""
        return self._original(*self._bound.args, **self._bound.kwargs)

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
