"""The model classes of transformers by model type, and what `architecture_check` says of one within a time limit."""

import signal
from typing import Any

import transformers
import transformers.models.auto.modeling_auto as auto

from tests.support.every_architecture.architecture_check import NO_REFERENCE, TRAINS, Outcome, check

SECONDS = 20  # of processor time for one class, so that other load on the machine changes no outcome
# The class a model type is known for: the first of these names that one has, else its first class.
MAIN = (
    *("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification"),
    *("ForObjectDetection", "ForCTC", "ForSequenceClassification", "For"),
)


def classes_by_type() -> dict[str, list[str]]:
    """Every model type of transformers' mappings, with the names of its classes."""
    found: dict[str, list[str]] = {}
    for name in sorted(vars(auto)):
        mapping = getattr(auto, name)
        if name.startswith("MODEL") and name.endswith("_NAMES") and isinstance(mapping, dict):
            for model_type, value in mapping.items():
                classes = found.setdefault(model_type, [])
                classes += [c for c in ([value] if isinstance(value, str) else value) if c not in classes]
    return {model_type: sorted(found[model_type]) for model_type in sorted(found)}


def main_class(classes: list[str]) -> str:
    return next((name for word in MAIN for name in classes if word in name), classes[0])


def try_class(name: str, model_type: str, attentions: tuple[str | None, ...] = (None,)) -> Outcome:
    """The outcome of a class; of several attentions the worst."""
    model_class: Any = getattr(transformers, name, None)
    if model_class is None:
        return Outcome(NO_REFERENCE, "transformers does not export it")

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s of processor time")

    outcome = Outcome(NO_REFERENCE, "")
    old = signal.signal(signal.SIGPROF, stop)
    try:
        for attention in attentions:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            new = check(model_class, model_type, attention)
            if attention is not None and new.kind == NO_REFERENCE:
                continue  # the model has no such attention
            outcome = new
            if outcome.kind != TRAINS:
                break
    except TimeoutError as error:
        outcome = Outcome(NO_REFERENCE, str(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    return outcome
