"""Wraps methods of `Trainer`, listed here with the reasons.

A Trainer without one of our names or callbacks runs its original methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from hf_lowprec.integrations.transformers import private_apis, trainer_setup
from hf_lowprec.integrations.transformers.checkpoints import optimizer_state, trainer_methods
from hf_lowprec.integrations.transformers.trainer_call import TrainerCall, attachment_of
from hf_lowprec.wrapped_method import wrap_method

Wrapper = Callable[[TrainerCall], Any]

_EVERY_TRAINER: dict[str, Wrapper] = {
    # Adds the callback, prepares the accelerator, casts the model before it is moved or wrapped.
    "__init__": trainer_setup.build,
    # Casts what has been added to the model since then, such as adapters, before the optimizer collects parameters.
    "create_optimizer": trainer_setup.create_optimizer,
    # Converts state between optimizers of this library and torch's own, in both directions.
    private_apis.LOAD_OPTIMIZER: optimizer_state.load_optimizer,
}
"""Method -> its replacement, for every Trainer: they determine whether a Trainer is one of ours, or meet its files."""

_OUR_TRAINERS: dict[str, Wrapper] = {
    # Turns autocast off and sets up FP32 sums of gradients.
    "create_accelerator_and_postprocess": trainer_setup.create_accelerator,
    # Clips inside the optimizer's step, where Trainer scales gradients on several device meshes itself.
    private_apis.NORM_OVER_MESHES: trainer_setup.norm_over_meshes,
    # Chooses a whole checkpoint to resume from, and reads its state.
    "train": trainer_methods.train,
    # Ends a run that resumes from its final checkpoint; Trainer would take one more step.
    private_apis.RUN_EPOCH: trainer_methods.run_epoch,
    # Writes the checkpoint's manifest when all ranks have written their files, before older ones are deleted.
    private_apis.SAVE_CHECKPOINT: trainer_methods.save_checkpoint,
    # Saves shards of models sharded at load, whose state Trainer does not save.
    private_apis.SAVE_OPTIMIZER: optimizer_state.save_optimizer,
    # Writes a model folder where Trainer writes nothing, under FSDP2 with sharded state dicts.
    "save_model": trainer_methods.save_model,
    # Loads weights into the parameters that the optimizer holds.
    private_apis.LOAD_CHECKPOINT: trainer_methods.load_checkpoint,
    # The same for the best checkpoint.
    private_apis.LOAD_BEST: trainer_methods.load_best,
}
"""Method -> its replacement, for Trainers with our callback."""
_WRAPPED = "_hf_lowprec_wrapped"
"""The attribute of Trainer once its methods are wrapped."""


def wrap_trainer() -> None:
    """Wrap Trainer's methods. Calling it again has no effect."""
    if hasattr(Trainer, _WRAPPED):  # other libraries may have wrapped them again
        return
    setattr(Trainer, _WRAPPED, True)
    for name, wrapper in (_EVERY_TRAINER | _OUR_TRAINERS).items():
        _wrap(name, wrapper, ours_only=name in _OUR_TRAINERS)
    wrap_method(Trainer, "get_optimizer_cls_and_kwargs", trainer_setup.get_optimizer_cls_and_kwargs)


def _wrap(name: str, wrapper: Wrapper, ours_only: bool) -> None:
    """Wrap a method of Trainer; skip one that this version of transformers does not have."""
    if not hasattr(Trainer, name):
        return
    positions = private_apis.positional_arguments(name)

    def method(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        if ours_only and attachment_of(trainer) is None:
            return original(trainer, *args, **kwargs)
        return wrapper(TrainerCall(original, positions, trainer, args, kwargs))

    wrap_method(Trainer, name, method)
