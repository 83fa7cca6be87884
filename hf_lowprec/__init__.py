"""Pure-BF16 training of Hugging Face models: `TrainingArguments(optim="adamw_bf16_split")`.

Importing the package imports neither torch nor transformers. Its optimizer names are added when transformers is
imported, and the methods of `Trainer` that act on them are wrapped then. All other names are imported on first use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hf_lowprec.import_hook import when_imported

if TYPE_CHECKING:  # at run time, `__getattr__` imports a name on first use
    from hf_lowprec.casting import CastReport as CastReport
    from hf_lowprec.casting import cast_model as cast_model
    from hf_lowprec.casting import return_float32 as return_float32
    from hf_lowprec.integrations.accelerate.accelerator import prepare_accelerator as prepare_accelerator
    from hf_lowprec.integrations.averaging import AveragedModel as AveragedModel
    from hf_lowprec.integrations.deepspeed.initialize import initialize_deepspeed as initialize_deepspeed
    from hf_lowprec.integrations.export.checkpoint_export import export_checkpoint as export_checkpoint
    from hf_lowprec.integrations.export.save_pretrained import save_pretrained as save_pretrained
    from hf_lowprec.integrations.transformers.callback import LowPrecisionCallback as LowPrecisionCallback
    from hf_lowprec.monitor.precision_monitor import PrecisionMonitor as PrecisionMonitor
    from hf_lowprec.optim import SGD as SGD
    from hf_lowprec.optim import Adafactor as Adafactor
    from hf_lowprec.optim import Adam as Adam
    from hf_lowprec.optim import AdamW as AdamW
    from hf_lowprec.optim import Adan as Adan
    from hf_lowprec.optim import Lion as Lion
    from hf_lowprec.optim import Muon as Muon
    from hf_lowprec.optim import Prodigy as Prodigy
    from hf_lowprec.optim import RAdam as RAdam
    from hf_lowprec.optim import ScheduleFreeAdamW as ScheduleFreeAdamW
    from hf_lowprec.optim import StableAdamW as StableAdamW
    from hf_lowprec.optim.algorithms._hidden_matrices import hidden_matrices as hidden_matrices
    from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES as OPTIMIZER_NAMES
    from hf_lowprec.optim.optimizer_names import optimizer_factory as optimizer_factory
    from hf_lowprec.optim.state.fp32_weights import drop_low_bits as drop_low_bits
    from hf_lowprec.optim.state.fp32_weights import fp32_state_dict as fp32_state_dict
    from hf_lowprec.optim.state.fp32_weights import keep_low_bits as keep_low_bits

    __version__: str

_DEFINED_IN = {
    "AveragedModel": "integrations.averaging",
    "CastReport": "casting",
    "cast_model": "casting",
    "drop_low_bits": "optim.state.fp32_weights",
    "export_checkpoint": "integrations.export.checkpoint_export",
    "fp32_state_dict": "optim.state.fp32_weights",
    "hidden_matrices": "optim.algorithms._hidden_matrices",
    "initialize_deepspeed": "integrations.deepspeed.initialize",
    "keep_low_bits": "optim.state.fp32_weights",
    "LowPrecisionCallback": "integrations.transformers.callback",
    "PrecisionMonitor": "monitor.precision_monitor",
    "prepare_accelerator": "integrations.accelerate.accelerator",
    "return_float32": "casting",
    "save_pretrained": "integrations.export.save_pretrained",
    "OPTIMIZER_NAMES": "optim.optimizer_names",
    "optimizer_factory": "optim.optimizer_names",
}
_ALGORITHMS = "SGD Adafactor Adam AdamW Adan Lion Muon Prodigy RAdam ScheduleFreeAdamW StableAdamW"
_PUBLIC = [*_DEFINED_IN, *_ALGORITHMS.split(), "register"]
_NEEDS = {
    "integrations.accelerate": "accelerate",
    "integrations.deepspeed": "deepspeed",
    "integrations.export": "transformers",
    "integrations.transformers": "transformers",
}
"""The library without which the modules of a subpackage cannot be imported."""

if not TYPE_CHECKING:  # type checkers read the imports above, and would accept any name
    __all__ = [*_PUBLIC]  # noqa: PLE0604

    def __getattr__(name: str) -> Any:
        if name in _DEFINED_IN:
            with _explained_import_errors(name):
                return getattr(import_module(f"hf_lowprec.{_DEFINED_IN[name]}"), name)
        if name == "__version__":
            return _version()
        if not name.startswith("__"):
            algorithms = import_module("hf_lowprec.optim").ALGORITHMS
            if name in algorithms:
                return algorithms[name]
        raise AttributeError(f"module 'hf_lowprec' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names that can be imported here, so that `help` and completion import them without errors."""
    found = {library: find_spec(library) is not None for library in {*_NEEDS.values()}}
    subpackages = {name: ".".join(where.split(".")[:2]) for name, where in _DEFINED_IN.items()}
    missing = {name for name, within in subpackages.items() if within in _NEEDS and not found[_NEEDS[within]]}
    special = {name for name in globals() if name.startswith("__")} | {"__version__"}
    return sorted(special | ({*_PUBLIC} - missing))


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("hf-lowprec")
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return "0+source"


def register() -> None:
    """Add the names in `OPTIMIZER_NAMES` to transformers now, and the support that they need to Trainer.

    There is rarely a reason to call it. Importing this package arranges that both happen as soon as transformers'
    modules are imported. Calling it again has no effect.

    Raises:
        ImportError: transformers or accelerate is not installed.
        RuntimeError: this version of transformers or accelerate is too old.
    """
    with _explained_import_errors("register()"):
        _add_optimizer_names()
        _wrap_trainer()


def _add_optimizer_names() -> None:
    from hf_lowprec.integrations.transformers.optim_names import add_optimizer_names

    add_optimizer_names()


def _wrap_trainer() -> None:
    from hf_lowprec.integrations.transformers.optim_names import check_versions, import_trainer

    check_versions()
    import_trainer()
    from hf_lowprec.integrations.transformers.trainer import wrap_trainer

    wrap_trainer()


def _collect_after_reduction(collector: Any) -> None:
    from hf_lowprec.integrations.collect_after_reduction import collect_after_reduction

    collect_after_reduction(collector)


def _check_first_gradients() -> None:
    from hf_lowprec.optim.gradients.collector import GradientCollector

    if _collect_after_reduction not in GradientCollector.first_gradient_checks:
        GradientCollector.first_gradient_checks.append(_collect_after_reduction)


@contextmanager
def _explained_import_errors(name: str) -> Iterator[None]:
    """Add to an ImportError inside what to install for `name`."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library in ("", "hf_lowprec"):
            raise
        from hf_lowprec.oldest_versions import install_command, outdated

        raise ImportError(
            f"hf_lowprec.{name} needs {outdated(library) or f'{library}, which is missing'} ({error}): "
            f"{install_command(library)}",
            name=error.name,
        ) from error


def _unless_too_old(add: Callable[[], None]) -> Callable[[], None]:
    """`add`, for an import of transformers by the user, which must succeed in any case.

    With a version that is too old, nothing is added: the error about an unknown `optim=` says so, and everything else
    works.
    """

    def add_or_warn() -> None:
        try:
            add()
        except RuntimeError:
            pass
        except Exception as error:
            warnings.warn(f"hf_lowprec cannot be used with Trainer: {error!r}", RuntimeWarning, stacklevel=2)

    return add_or_warn


when_imported("hf_lowprec.optim", _check_first_gradients)
when_imported("transformers.training_args", _unless_too_old(_add_optimizer_names))
when_imported("transformers.trainer", _unless_too_old(_wrap_trainer))
