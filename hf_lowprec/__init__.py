"""Pure-BF16 training of Hugging Face models: `TrainingArguments(optim="adamw_bf16_kahan")`.

Importing the package adds its optimizer names to transformers and wraps the methods of `Trainer` that act on them. All
other names are imported on first use.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time, `__getattr__` imports a name on first use
    from hf_lowprec.casting import CastReport, cast_model, return_float32
    from hf_lowprec.integrations.accelerate.accelerator import prepare_accelerator
    from hf_lowprec.integrations.averaging import AveragedModel
    from hf_lowprec.integrations.export.save_pretrained import save_pretrained
    from hf_lowprec.integrations.transformers.callback import LowPrecisionCallback
    from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
    from hf_lowprec.optim import SGD, Adam, AdamW, Adan, Lion, Muon, RAdam, StableAdamW
    from hf_lowprec.optim.algorithms._hidden_matrices import hidden_matrices
    from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES, optimizer_factory
    from hf_lowprec.optim.state.low_bits import drop_low_bits, fp32_state_dict, keep_low_bits
    from hf_lowprec.tools.export.checkpoint_export import export_checkpoint

try:
    __version__ = metadata.version("hf-lowprec")
except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+source"

_DEFINED_IN = {
    "AveragedModel": "integrations.averaging",
    "CastReport": "casting",
    "cast_model": "casting",
    "drop_low_bits": "optim.state.low_bits",
    "export_checkpoint": "tools.export.checkpoint_export",
    "fp32_state_dict": "optim.state.low_bits",
    "hidden_matrices": "optim.algorithms._hidden_matrices",
    "keep_low_bits": "optim.state.low_bits",
    "LowPrecisionCallback": "integrations.transformers.callback",
    "PrecisionMonitor": "monitor.precision_monitor",
    "prepare_accelerator": "integrations.accelerate.accelerator",
    "return_float32": "casting",
    "save_pretrained": "integrations.export.save_pretrained",
    "OPTIMIZER_NAMES": "optim.optimizer_names",
    "optimizer_factory": "optim.optimizer_names",
}

__all__ = [
    "OPTIMIZER_NAMES",
    "SGD",
    "Adam",
    "AdamW",
    "Adan",
    "AveragedModel",
    "CastReport",
    "Lion",
    "LowPrecisionCallback",
    "Muon",
    "PrecisionMonitor",
    "RAdam",
    "StableAdamW",
    "cast_model",
    "drop_low_bits",
    "export_checkpoint",
    "fp32_state_dict",
    "hidden_matrices",
    "keep_low_bits",
    "optimizer_factory",
    "prepare_accelerator",
    "register",
    "return_float32",
    "save_pretrained",
]

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name in _DEFINED_IN:
            return getattr(import_module(f"hf_lowprec.{_DEFINED_IN[name]}"), name)
        if name in _algorithms():
            return _algorithms()[name]
        raise AttributeError(f"module 'hf_lowprec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _algorithms() -> dict[str, Any]:
    """The optimizer classes by name."""
    return import_module("hf_lowprec.optim").ALGORITHMS


def register() -> None:
    """Add the names of `OPTIMIZER_NAMES` to transformers. Runs on import; calling it again has no effect."""
    from hf_lowprec.integrations.transformers.trainer import register as register_with_trainer

    register_with_trainer(unpickle_optimizer_name)


def unpickle_optimizer_name(name: str) -> Any:
    """Return the member of transformers' enum whose value is `name`, as stored in `TrainingArguments.optim`.

    Files such as `training_args.bin` refer to this function by its path, so loading one imports `hf_lowprec`, which
    adds the names.

    Raises:
        ValueError: this version has no optimizer of that name.
    """
    from hf_lowprec.integrations.private_apis import optimizer_member

    try:
        return optimizer_member(name)
    except ValueError:
        raise ValueError(
            f"optim={name!r} is not known to hf_lowprec {__version__}; install the version that it was saved with"
        ) from None


def register_or_warn() -> None:
    """`register`, with a warning if this version of transformers cannot have the names: everything else works."""
    try:
        register()
    except RuntimeError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def _runs_command_line() -> bool:
    """Return whether this process runs `hf-lowprec` or `python -m hf_lowprec`, whose commands register the names."""
    if getattr(sys.modules.get("hf_lowprec_cli"), "running", False):
        return True
    # While Python looks for the module to run, `sys.argv` is `["-m", *arguments]`, and the module's name precedes the
    # arguments in `sys.orig_argv`.
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "hf_lowprec"


if not _runs_command_line():
    register_or_warn()
    __all__.extend(name for name in _algorithms() if name not in __all__)  # those of added files
