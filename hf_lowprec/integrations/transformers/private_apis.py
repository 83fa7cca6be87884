"""The only module that uses private names of transformers, or replaces names in it.

Each has a test in `tests/integrations/test_private_apis.py` that fails when a new version of the library removes it.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils
import transformers.trainer
from torch.distributed.fsdp import StateDictType
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_lowprec.integrations.accelerate.private_apis import is_sharded_at_load
from hf_lowprec.wrapped_method import temporarily_wrapped, wrap_method

RUN_EPOCH = "_run_epoch"
"""Trainer's method that trains for (the rest of) an epoch; it compares steps with `max_steps` only after a step."""

SAVE_CHECKPOINT = "_save_checkpoint"
"""Trainer's method that writes a checkpoint, `trainer_state.json` last, and then pushes it and deletes older ones."""

LOAD_CHECKPOINT = "_load_from_checkpoint"
"""Trainer's method that loads a checkpoint's weights when resuming; its last argument is the model."""

LOAD_OPTIMIZER = "_load_optimizer_and_scheduler"
"""Trainer's method that loads the state of optimizer and scheduler when resuming, after the weights."""

LOAD_BEST = "_load_best_model"
"""Trainer's method that loads the best weights at the end of a run."""


SAVE_OPTIMIZER = "_save_optimizer_and_scheduler"
"""Trainer's method that saves the state of optimizer and scheduler; its argument is the checkpoint's folder."""

NORM_OVER_MESHES = "_mixed_mesh_grad_norm"
"""Trainer's method that clips gradients on several device meshes, which it scales."""


MOVE_MODEL = "_move_model_to_device"
"""Trainer's method that moves a model to a device."""


@functools.cache
def constructor_arguments(constructor: Callable) -> list[str]:
    """Return the names of the arguments of Trainer's constructor, without `self`, in order.

    Args:
        constructor: Trainer's, or the one that another library has put in its place. If it takes `*args`, their names
            come from Trainer's source.
    """
    parameters = inspect.signature(constructor).parameters.values()
    if all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in parameters):
        return [parameter.name for parameter in parameters][1:]
    functions = [node for node in ast.walk(ast.parse(inspect.getsource(Trainer))) if isinstance(node, ast.FunctionDef)]
    in_source = next(function for function in functions if function.name == "__init__")
    return [argument.arg for argument in in_source.args.args[1:]]


def checkpoint_folder(trainer: Trainer, trial: Any) -> Path:
    """Return the folder to which `trainer` saves the checkpoint of its current step.

    Args:
        trainer: the Trainer, during training.
        trial: the trial of a hyperparameter search, or None.
    """
    return Path(trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")


def state_dict_type(trainer: Trainer) -> str | None:
    """Return how checkpoints hold a sharded model: FULL_STATE_DICT or SHARDED_STATE_DICT; None for other models."""
    if is_sharded_at_load(trainer.model):
        return StateDictType.SHARDED_STATE_DICT.name
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return None if plugin is None else str(plugin.state_dict_type.name)


def saves_sharded(trainer: Trainer) -> bool:
    """Return whether the checkpoints of `trainer` hold shards of the model, and neither configuration nor tokenizer."""
    return state_dict_type(trainer) not in (None, StateDictType.FULL_STATE_DICT.name)


@contextmanager
def _set_inside(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside."""
    configured = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, configured)


def saving_whole_models(trainer: Trainer) -> AbstractContextManager[None]:
    """Inside, let `save_model` write full models under FSDP. Where checkpoints hold shards, Trainer writes nothing."""
    if not saves_sharded(trainer) or is_sharded_at_load(trainer.model):
        return nullcontext()
    return _set_inside(trainer.accelerator.state.fsdp_plugin, "state_dict_type", StateDictType.FULL_STATE_DICT)


def allowing_checkpoints(args: Any, model: Any) -> AbstractContextManager[None]:
    """Allow building a Trainer inside that saves checkpoints of a `model` sharded at load, which Trainer rejects."""
    return (
        nullcontext() if args is None or not is_sharded_at_load(model) else _set_inside(args, "save_only_model", True)
    )


def one_group_for_all_meshes() -> AbstractContextManager[None]:
    """Let Trainer build param groups inside as it does for a model that is not sharded.

    Trainer splits them by device mesh, which our optimizers do by themselves. Parameters would get other numbers, and
    thus other random bits, and a checkpoint would not fit another mesh.
    """
    return temporarily_wrapped(transformers.trainer, "has_mixed_dtensor", lambda original, params: False)


def computing_saved_tensors(compute: Callable[[dict[str, Any]], dict[str, Any]]) -> AbstractContextManager[None]:
    """Make `PreTrainedModel.save_pretrained` write `compute(tensors)` instead of each file's tensors.

    It takes a full state dict and writes it file by file, so tensors can be computed when their file is written.
    """

    def save_file(original: Callable, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        original(compute(tensors), *args, **kwargs)

    return temporarily_wrapped(transformers.modeling_utils, "safe_save_file", save_file)


def in_saved_layout(model: PreTrainedModel, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a state dict of `model` to the names and shapes in which `save_pretrained` writes it."""
    return revert_weight_conversion(model, state_dict)


def trainer_states_read_by(
    read: Callable[[Path, type[TrainerState]], TrainerState],
) -> AbstractContextManager[None]:
    """Make Trainer read `trainer_state.json` with `read(path, cls)`, where `cls` is the class that it expects."""

    def load_from_json(original: Callable, cls: type[TrainerState], json_path: str) -> TrainerState:
        return read(Path(json_path), cls)

    return temporarily_wrapped(TrainerState, "load_from_json", load_from_json)


def calling_after_trainer_state(act: Callable[[], None]) -> AbstractContextManager[None]:
    """Inside, call `act` when Trainer has written `trainer_state.json`, before it deletes older checkpoints."""

    def save_to_json(original: Callable, state: TrainerState, json_path: str) -> None:
        original(state, json_path)
        act()

    return temporarily_wrapped(TrainerState, "save_to_json", save_to_json)


def read_checkpoints_in_float32(trainer: Trainer) -> None:
    """Make a trainer that reads checkpoints with `from_pretrained`, as sentence-transformers does, read them in FP32.

    By default, `from_pretrained` gives every weight the one dtype of the saved config, which would round FP32 norms.
    """
    if getattr(type(trainer), LOAD_CHECKPOINT) is not getattr(Trainer, LOAD_CHECKPOINT):
        wrap_method(trainer, LOAD_CHECKPOINT, _in_float32)


def _in_float32(load: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call `load` while `from_pretrained` without a `dtype` loads FP32."""

    def from_pretrained(original: Callable, cls: type, *args: Any, **kwargs: Any) -> Any:
        default = {} if {"dtype", "torch_dtype"} & kwargs.keys() else {"dtype": torch.float32}
        return original(cls, *args, **default, **kwargs)

    with temporarily_wrapped(PreTrainedModel, "from_pretrained", from_pretrained):
        return load(*args, **kwargs)
