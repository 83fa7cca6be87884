"""The call that wrappers of Trainer's methods receive, and the state that this package keeps on a Trainer."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from transformers import Trainer

from hf_lowprec.integrations.transformers.callback import LowPrecisionCallback
from hf_lowprec.integrations.transformers.checkpoint_manifest import ManifestWriter

_ATTRIBUTE = "_hf_lowprec"
"""The attribute of a Trainer that holds its `Attachment`."""


class TrainerCall:
    """A call of a method of `trainer` that was wrapped.

    Attributes:
        trainer: whose method is called.
        arguments: those that were passed, by name, `self` included; the method gets what is changed here.
    """

    def __init__(self, original: Callable, trainer: Trainer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original = original
        self._bound = inspect.signature(original).bind(trainer, *args, **kwargs)
        self.trainer = trainer
        self.arguments = self._bound.arguments

    def proceed(self) -> Any:
        """Call Trainer's own method."""
        return self._original(*self._bound.args, **self._bound.kwargs)

    @property
    def attachment(self) -> Attachment:
        """The state that this package keeps on the Trainer, which is one of ours."""
        attachment = attachment_of(self.trainer)
        assert attachment is not None
        return attachment


@dataclasses.dataclass
class Attachment:
    """The state that this package keeps on a Trainer.

    Attributes:
        callback: the one that it was built with.
        manifests: writes the manifests of its checkpoints; a new one for each run.
    """

    callback: LowPrecisionCallback
    manifests: ManifestWriter = dataclasses.field(default_factory=ManifestWriter)


def attach(trainer: Trainer, callback: LowPrecisionCallback) -> None:
    """Make `trainer` one of ours."""
    setattr(trainer, _ATTRIBUTE, Attachment(callback))


def attachment_of(trainer: Trainer) -> Attachment | None:
    """The state that this package keeps on `trainer`; None if it is not one of ours."""
    return getattr(trainer, _ATTRIBUTE, None)
