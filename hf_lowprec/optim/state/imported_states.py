"""State dicts of optimizers of torch and transformers, converted to those of the same algorithm here.

A state dict does not name its optimizer, so formats are recognized by the keys of their param groups. Hyperparameters
are taken over, the states get this optimizer's `state_dtype` (rounded to nearest), and settings that exist only here
stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup

OptimizerState = dict[str, Any]
"""A parameter's entry in `state_dict["state"]`."""

START_AGAIN = (
    "start with fresh state: load only the model's weights, and leave out optimizer.load_state_dict (under Trainer: "
    "model = from_pretrained(checkpoint, dtype='float32'), then train() without resume_from_checkpoint)"
)

_WITHOUT_MEANING = {
    *("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"),
    *("clip_threshold", "decay_rate", "warmup_init"),
}
"""Keys that are dropped unless the algorithm here has them."""


@dataclass(frozen=True)
class ForeignFormat:
    """A format in which other optimizers save their state. Keys are separated by spaces.

    Attributes:
        library: its name in messages.
        algorithms: the algorithms here that compute the same.
        marks: keys that its param groups have.
        lacks: keys that its param groups do not have.
        hyperparameters: `(saved group, algorithm) -> keys to replace`; raises ValueError, with the reason as message,
            if the formula differs from the algorithm's.
        states: `state -> state` with the names and shapes that the algorithm uses.
    """

    library: str
    algorithms: tuple[str, ...]
    marks: str
    lacks: str = ""
    hyperparameters: Callable[[ParamGroup, str], ParamGroup] = lambda saved, algorithm: {}
    states: Callable[[OptimizerState], OptimizerState] = lambda state: state

    def group(self, algorithm: str, own: ParamGroup, saved: ParamGroup, where: str) -> ParamGroup:
        """The group `saved` with the keys of `own`, a param group of the optimizer that loads it.

        Raises:
            ValueError: the formulas differ.
        """
        if algorithm not in self.algorithms:
            raise ValueError(
                f"{where} of the state dict was saved by {self.library}, whose state {algorithm} cannot use; load "
                f"it into {' or '.join(self.algorithms)}, or {START_AGAIN}"
            )
        try:
            replaced = self.hyperparameters(saved, algorithm)
        except ValueError as reason:
            message = f"{where} of the state dict was saved by {self.library} with {reason}; or {START_AGAIN}"
            raise ValueError(message) from None
        kept = {key: value for key, value in saved.items() if key in own or key not in _WITHOUT_MEANING}
        # "nearest" requires no state of a rounding mode; one that is there continues to be used.
        return {**own, **kept, **replaced, "rounding": "nearest"}

    def state(self, state: OptimizerState) -> OptimizerState:
        """A parameter's saved `state`, with the names and values of this optimizer; empty if it was never stepped."""
        converted = {name: value for name, value in self.states(dict(state)).items() if value is not None}
        # SGD does not count steps; what matters to it is whether there was one.
        return {"step": 1, **converted} if converted else {}


def format_of(saved: ParamGroup) -> ForeignFormat | None:
    """The format of a saved param group; None if it is this library's or unknown."""
    if {"rounding", "state_rounding"} & saved.keys():
        return None
    for one in FORMATS:
        if saved.keys() >= {*one.marks.split()} and saved.keys().isdisjoint(one.lacks.split()):
            return one
    return None


def conversion_note(formats: Iterable[ForeignFormat | None], algorithm: str) -> list[str]:
    """The warning that state was converted, if any of the groups' formats is foreign."""
    libraries = dict.fromkeys(one.library for one in formats if one is not None)
    return [
        f"the state of {library} was converted for {algorithm}: hyperparameters are those of the state dict, states "
        "are rounded to this optimizer's state_dtype"
        for library in libraries
    ]


def _torch_adam(saved: ParamGroup, algorithm: str) -> ParamGroup:
    """Before torch 2.7, only the class tells Adam from AdamW."""
    decoupled = saved.get("decoupled_weight_decay", algorithm == "AdamW")
    if algorithm == "AdamW" and saved["weight_decay"] and not decoupled:
        raise ValueError("an L2 penalty as weight decay; load it into Adam")
    return {"decoupled_weight_decay": decoupled} if algorithm == "Adam" else {}


def _transformers_adafactor(saved: ParamGroup, algorithm: str) -> ParamGroup:
    """It knows no largest relative step but 10⁻²."""
    if saved["warmup_init"]:
        raise ValueError("warmup_init=True; set it to False and use a scheduler")
    if saved["weight_decay"] and (saved["relative_step"] or saved["scale_parameter"]):
        raise ValueError("a weight decay that relative_step and scale_parameter change; set its weight_decay to 0")
    return {
        "beta2_decay": saved["decay_rate"],
        "d": saved["clip_threshold"],
        "eps": (0.0, saved["eps"][1]),
        "square_eps": saved["eps"][0],
        "lr": 1e-2 if saved["relative_step"] else saved["lr"],
        "maximize": False,
    }


def _transformers_adafactor_states(state: OptimizerState) -> OptimizerState:
    def unsqueezed(name: str, dim: int) -> Tensor | None:
        means: Tensor | None = state.pop(name, None)
        return None if means is None else means.unsqueeze(dim)

    state.pop("RMS", None)
    state["variance"] = state.pop("exp_avg_sq", None)
    state["row_var"], state["col_var"] = unsqueezed("exp_avg_sq_row", -1), unsqueezed("exp_avg_sq_col", -2)
    return state


FORMATS = (
    ForeignFormat(
        "torch.optim.Adam or torch.optim.AdamW",
        ("AdamW", "Adam"),
        "betas eps weight_decay amsgrad foreach",
        hyperparameters=_torch_adam,
    ),
    ForeignFormat(
        "torch.optim.RAdam", ("RAdam",), "betas eps decoupled_weight_decay foreach", lacks="amsgrad momentum_decay"
    ),
    ForeignFormat("torch.optim.SGD", ("SGD",), "momentum dampening nesterov foreach"),
    ForeignFormat(
        "transformers.Adafactor",
        ("Adafactor",),
        "clip_threshold decay_rate beta1 warmup_init",
        hyperparameters=_transformers_adafactor,
        states=_transformers_adafactor_states,
    ),
)
"""Every format that is converted."""
