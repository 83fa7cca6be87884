"""Sends the precision of a run to the trackers that Trainer reports to: TensorBoard, Weights & Biases, trackio, ….

The console shows whatever is in Trainer's logs, so the numbers by kind of parameters are added only to the logs that
the trackers' callbacks receive. Each gets one call per log: a second one would be another step for some of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.integrations import INTEGRATION_TO_CALLBACK

from hf_lowprec.integrations.transformers.reports.run_metrics import PrecisionSource
from hf_lowprec.integrations.wrapped_method import temporarily_wrapped

REPORT = "precision_report"
"""The name of the precision report in trackers."""

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def reporting_precision(handler: Any, source: PrecisionSource) -> Iterator[None]:
    """During the training run inside, send to trackers what `source` reports when training begins and at each log.

    Args:
        handler: the Trainer's `callback_handler`. `source` must be before the trackers in its list.
        source: the callback that measures.
    """
    with contextlib.ExitStack() as wrapped:
        begin = functools.partial(_connect, source, wrapped)
        wrapped.enter_context(temporarily_wrapped(handler, "on_train_begin", begin))
        yield


def tracker_values(by_kind: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The numbers by kind of parameters as trackers get them: `precision/<kind>/<name>` -> value."""
    return {
        f"precision/{kind}/{name}": value
        for kind, values in by_kind.items()
        for name, value in values.items()
        if math.isfinite(value)
    }


def _connect(
    source: PrecisionSource,
    wrapped: contextlib.ExitStack,
    original: Callable,
    handler: Any,
    args: Any,
    state: TrainerState,
    control: Any,
) -> Any:
    """`CallbackHandler.on_train_begin`: let trackers begin their runs, then send the report and wrap their `on_log`."""
    control = original(handler, args, state, control)
    if not state.is_world_process_zero:
        return control
    for tracker in handler.callbacks:
        name = _tracker_name(tracker)
        if name is not None:
            _send_report(name, tracker, source.report_text)
            wrapped.enter_context(temporarily_wrapped(tracker, "on_log", _PrecisionInLogs(name, source).log))
    return control


class _PrecisionInLogs:
    """Adds the numbers by kind to the logs that one tracker receives, until it fails with them."""

    def __init__(self, name: str, source: PrecisionSource) -> None:
        self._name, self._source, self._failed = name, source, False

    def log(
        self,
        original: Callable,
        tracker: Any,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`on_log` of the tracker. An error that it also raises without our numbers is not ours to hide."""
        precision = self._source.precision
        if logs is not None and precision is not None and not self._failed:
            try:
                return original(
                    tracker, args, state, control, logs={**logs, **tracker_values(precision.by_kind)}, **kwargs
                )
            except Exception as error:
                self._failed = True
                logger.warning(
                    "hf_lowprec: %s gets no more precision numbers, since they failed: %r", self._name, error
                )
        return original(tracker, args, state, control, logs=logs, **kwargs)


def _tracker_name(callback: TrainerCallback) -> str | None:
    """The name by which `report_to` knows the tracker of a callback; None for other callbacks."""
    names = {cls: name for name, cls in INTEGRATION_TO_CALLBACK.items() if name not in _PROGRESS_DISPLAYS}
    return next((names[cls] for cls in type(callback).__mro__ if cls in names), None)


_PROGRESS_DISPLAYS = ("kubeflow",)
"""Integrations that show the state of a job, like a console, and keep no history."""


def _send_report(name: str, tracker: Any, text: str) -> None:
    """Send the precision report to a tracker. An error does not stop training."""
    try:
        if name in _REPORTS:
            _REPORTS[name](tracker, text)
    except Exception as error:  # trackers raise many types
        logger.warning("hf_lowprec: %s rejected the precision report: %r", name, error)


def _report_to_mlflow(tracker: Any, text: str) -> None:
    import_module("mlflow").log_text(text, f"{REPORT}.txt")  # parameters have a maximum length


# Neither logs nor training arguments can carry the text, though all trackers' callbacks send them: most callbacks drop
# strings in logs, MLflow's drops long arguments, and TensorBoard's shows arguments as JSON.
_REPORTS: dict[str, Callable[[Any, str], Any]] = {
    # It shows Markdown, which keeps the lines of indented text.
    "tensorboard": lambda tracker, text: tracker.tb_writer.add_text(REPORT, textwrap.indent(text, "    ")),
    # A resumed run may have another report.
    "wandb": lambda tracker, text: import_module("wandb").config.update({REPORT: text}, allow_val_change=True),
    "trackio": lambda tracker, text: import_module("trackio").config.__setitem__(REPORT, text),
    "mlflow": _report_to_mlflow,
    "dagshub": _report_to_mlflow,
    "comet_ml": lambda tracker, text: (
        import_module("comet_ml").get_running_experiment().log_text(text, metadata={"name": REPORT})
    ),
    "clearml": lambda tracker, text: (
        import_module("clearml").Task.current_task().set_configuration_object(REPORT, config_text=text)
    ),
    "swanlab": lambda tracker, text: import_module("swanlab").config.update({REPORT: text}),
    "neptune": lambda tracker, text: tracker.run.__setitem__(REPORT, text),
    "dvclive": lambda tracker, text: tracker.live.log_param(REPORT, text),
}
"""Tracker -> how its public interface takes a text."""
