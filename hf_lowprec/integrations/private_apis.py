"""The only module that uses private names of transformers and accelerate, or replaces names in other libraries.

Each has a test in `tests/integrations/test_private_apis.py` that fails when a new version of the library removes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import transformers
import transformers.modeling_utils
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import nn
from torch.distributed.fsdp import FSDPModule, StateDictType
from transformers import PreTrainedModel, Trainer, TrainerState, trainer_optimizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import OptimizerNames

from hf_lowprec.integrations.wrapped_method import temporarily_wrapped, wrap_method
from hf_lowprec.optim.unwrap_optimizer import unwrap_optimizer

RUN_EPOCH = "_run_epoch"
"""Trainer's method that trains for (the rest of) an epoch; it compares steps with `max_steps` only after a step."""

SAVE_CHECKPOINT = "_save_checkpoint"
"""Trainer's method that writes a checkpoint, `trainer_state.json` last, and then deletes older ones."""

LOAD_CHECKPOINT = "_load_from_checkpoint"
"""Trainer's method that loads a checkpoint's weights when resuming; its last argument is the model."""

LOAD_OPTIMIZER = "_load_optimizer_and_scheduler"
"""Trainer's method that loads the state of optimizer and scheduler when resuming, after the weights."""

LOAD_BEST = "_load_best_model"
"""Trainer's method that loads the best weights at the end of a run."""

_PREPARED = "_is_accelerate_prepared"
"""The attribute by which accelerate marks a model that it has prepared."""

OptimizerHandler = Callable[[Any], tuple[Any, dict[str, Any]]]


def add_optimizer_names(names: Iterable[str], handler: OptimizerHandler, unpickle: Callable[[str], Any]) -> None:
    """Add `names` to `OptimizerNames`, its error about unknown ones, and Trainer's dispatch table. Existing names are
    not changed.

    `TrainingArguments` accepts only members of this enum, and there is no public way to extend it.

    Args:
        names: the values of the new members.
        handler: the function for these names in the dispatch table.
        unpickle: the function that a pickled member calls with its value. Unpickling imports its module, which adds the
            members. Pickled by default, a member would refer only to the enum, which may not have it yet.

    Raises:
        RuntimeError: this version of transformers keeps optimizer names elsewhere.
    """
    try:
        handlers = trainer_optimizer._OPTIMIZER_HANDLERS
        for name in names:
            if name not in OptimizerNames._value2member_map_:
                _add_member(name, unpickle)
            handlers[OptimizerNames(name)] = handler
        _suggest_close_names()
    except AttributeError as error:
        raise RuntimeError(
            f"transformers {transformers.__version__} has changed where optimizer names live ({error}), so `optim=` "
            "names of hf_lowprec cannot be registered; use Trainer(optimizer_cls_and_kwargs="
            "hf_lowprec.optimizer_factory(…), callbacks=[hf_lowprec.LowPrecisionCallback()]) or another version of "
            "transformers"
        ) from error


def _add_member(name: str, unpickle: Callable[[str], Any]) -> None:
    member = str.__new__(OptimizerNames, name)
    member._name_, member._value_ = name.upper(), name
    member.__objclass__ = OptimizerNames
    member.__reduce_ex__ = lambda protocol: (unpickle, (name,))
    member._sort_order_ = len(OptimizerNames._member_names_)
    OptimizerNames._member_names_.append(member._name_)
    OptimizerNames._member_map_[member._name_] = member
    OptimizerNames._value2member_map_[name] = member
    type.__setattr__(OptimizerNames, member._name_, member)


def _suggest_close_names() -> None:
    """Let the error about an unknown name end with the closest known one: it lists some 80 of them."""
    if "_missing_" in vars(OptimizerNames):
        return

    def missing(original: Callable, cls: type[OptimizerNames], value: Any) -> Any:
        try:
            return original(cls, value)
        except ValueError as error:
            near = difflib.get_close_matches(str(value), cls._value2member_map_, n=1)
            raise ValueError(f"{error}" + (f". Did you mean {near[0]!r}?" if near else "")) from None

    wrap_method(OptimizerNames, "_missing_", missing)


def optimizer_member(name: str) -> OptimizerNames:
    """The member of transformers' enum whose value is `name`."""
    return OptimizerNames(name)


@contextmanager
def before_fully_shard(first: Callable[[dict[str, Any]], Collection[nn.Module]]) -> Iterator[None]:
    """Call `first` just before the first `fully_shard` inside, with the options of that call.

    Accelerate chooses the options and the time, and may have moved the model to the meta device by then. It looks up
    `fully_shard` in `torch.distributed.fsdp` when it shards a model, so the function is replaced there.

    Args:
        first: a function that shards some modules itself and returns them. They are left out of accelerate's calls,
            which were planned earlier and would shard them again.

    Raises:
        RuntimeError: no `fully_shard` ran inside.
    """
    sharded: Collection[nn.Module] | None = None

    def fully_shard(original: Callable, module: Any, **options: Any) -> Any:
        nonlocal sharded
        if sharded is None:
            sharded = first(options)
        if isinstance(module, nn.Module):
            return module if module in sharded else original(module, **options)
        unsharded = [one for one in module if one not in sharded]
        if unsharded:
            original(unsharded, **options)
        return module

    with temporarily_wrapped(torch.distributed.fsdp, "fully_shard", fully_shard):
        yield
    if sharded is None:
        raise RuntimeError("this version of accelerate shards a model without torch.distributed.fsdp.fully_shard")


def is_sharded_model(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded `model` as a whole. Accelerate returns such a model unchanged."""
    return isinstance(getattr(model, "_orig_mod", model), FSDPModule) or isinstance(model, FSDPModule)


def switch_autocast_off(accelerator: Any) -> bool:
    """Set the mixed precision of `accelerator` to "no", and return whether this changed it."""
    if accelerator.mixed_precision == "no":
        return False
    accelerator.state._mixed_precision = "no"
    accelerator.native_amp = False
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.mixed_precision_policy = None
    return True


def prepared_models(accelerator: Any) -> list[Any]:
    """The models that `accelerator` has prepared, including those used only for evaluation.

    A model wrapped by DDP is listed without its wrapper. FSDP2 shards in place.
    """
    return list(accelerator._models)


def runs_under_autocast(model: Any) -> bool:
    """Return whether an accelerator has wrapped `forward` of `model` in autocast, as it does for mixed precision."""
    return hasattr(model, "_original_forward")


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """The optimizers that `accelerator` has prepared, without accelerate's wrappers."""
    return [unwrap_optimizer(optimizer) for optimizer in accelerator._optimizers]


def ignored_by_fsdp2(accelerator: Any, model: nn.Module) -> Collection[nn.Parameter]:
    """The parameters of `model` that FSDP2 will not shard, by the `ignored_modules` of accelerate's plugin."""
    ignored = accelerator.state.fsdp_plugin.ignored_modules
    return get_parameters_from_modules(ignored, model, accelerator.device)


def has_adapters(model: Any) -> bool:
    """Return whether a transformers model was given adapters by its own `add_adapter` or `load_adapter`."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def prepared_again_later(model: Any) -> Iterator[None]:
    """Allow `model` to be prepared for training after `Accelerator.prepare_model` was called inside for evaluation.

    Accelerate marks every model that it prepares, even one for evaluation only, and returns marked models unchanged.
    After `Trainer.evaluate()`, `Trainer.train()` would get a model without DDP, and every process would train alone.
    """
    marked_before = getattr(model, _PREPARED, False)
    try:
        yield
    finally:
        if not marked_before:
            vars(model).pop(_PREPARED, None)


def checkpoint_folder(trainer: Trainer, trial: Any) -> Path:
    """The folder to which `trainer` saves the checkpoint of its current step.

    Args:
        trainer: the Trainer, during training.
        trial: the trial of a hyperparameter search, or None.
    """
    return Path(trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")


def state_dict_type(trainer: Trainer) -> str | None:
    """How checkpoints of `trainer` hold the model under FSDP: FULL_STATE_DICT or SHARDED_STATE_DICT; else None."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return None if plugin is None else str(plugin.state_dict_type.name)


def saves_sharded(trainer: Trainer) -> bool:
    """Return whether the checkpoints of `trainer` hold shards of the model, and neither configuration nor tokenizer."""
    return state_dict_type(trainer) not in (None, StateDictType.FULL_STATE_DICT.name)


@contextmanager
def saving_whole_models(trainer: Trainer) -> Iterator[None]:
    """Let `save_model` write whole models under FSDP inside. Where checkpoints hold shards, Trainer writes nothing."""
    if not saves_sharded(trainer):
        yield
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    configured, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = configured


def computing_saved_tensors(compute: Callable[[dict[str, Any]], dict[str, Any]]) -> AbstractContextManager[None]:
    """Make `PreTrainedModel.save_pretrained` write `compute(tensors)` in place of the tensors of each file.

    It takes a whole state dict and writes it file by file, so tensors can be computed when their file is written.
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
