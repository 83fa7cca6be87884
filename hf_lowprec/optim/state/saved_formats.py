"""The formats of optimizer state dicts: ours, which every checkpoint format can hold, and those of other libraries.

`to_saved_form` turns what `torch.optim.Optimizer.state_dict` returns into ours, and `from_saved_form` back. Each param
group has a header, inside the value of a key that torch's optimizers have always had; see `_CARRIER`.

State dicts of other libraries do not name their optimizer, so their formats are recognized by the keys of their param
groups. They are converted to the format of the same algorithm here: hyperparameters are taken over, states get this
optimizer's `state_dtype` (rounded to nearest), and settings that exist only here stay as they are.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lowprec.optim.arguments import dtype_of
from hf_lowprec.optim.sharding import dtensor_like, is_sharded, local_shard
from hf_lowprec.optim.state.fp32_weights import low_bits_state, zero_low_bits_of_other_weights
from hf_lowprec.rounding import dtype_name
from hf_lowprec.rounding.attached_low_bits import low_bits_to_save
from hf_lowprec.rounding.modes import AUXILIARY_STATES

if TYPE_CHECKING:
    from hf_lowprec.optim.algorithm_interface import Algorithm, ParamGroup

FORMAT = 2
"""Version of saved state dicts, and the only one that is read."""

HEADER = "header"
"""Key of a param group that is being loaded: the name of the algorithm that saved it, and the format."""

NORM_BEFORE = "norm_before"
"""Key of the first group: the gradient norm of the last step, by which `clip="delayed"` clips the next one."""

SKIPPED_STEPS = "skipped_steps"
"""Key of the first group: how many steps `skip_nonfinite` has skipped; missing if none."""

ADDED_KEYS: tuple[str, ...] = ("first_parameter", NORM_BEFORE, SKIPPED_STEPS)
"""Optional keys of param groups. They are saved in the header, since distributed checkpoints fail on a key that they
lack."""

LOW_BITS = "low_bits"
"""Key of a state dict: low bits of parameters that have not been stepped yet, by number. It is left out if there are
none."""

_CARRIER = "state_rounding"
"""The key whose saved value is a JSON string of the header, `ADDED_KEYS` and the value itself.

Distributed checkpoints hold only states and the keys of param groups, and torch raises an error if a checkpoint lacks a
key. It is a string because torch flattens containers into separate keys.
"""

_CARRIED: dict[str, Any] = {
    _CARRIER: object,
    "optimizer": str,
    "format": int,
    "first_parameter": (int, type(None)),
    NORM_BEFORE: float,
    SKIPPED_STEPS: int,
}
"""The keys of that string, and the types of their values."""

_BYTES = 2
"""The size of the last dimension in which int16 states are saved as bytes: gloo and NCCL gather and send uint8, but not
int16."""


def to_saved_form(optimizer: Algorithm, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert `state_dict`, as torch returns it, to a form that every checkpoint format can hold.

    Each param group gets a header. Dtypes are replaced by their names, and int16 states by views of their bytes, since
    distributed checkpoints can gather neither.
    """

    def saved_group(group: ParamGroup) -> ParamGroup:
        header = {_CARRIER: group[_CARRIER], "optimizer": algorithm_name(optimizer), "format": FORMAT}
        header |= {key: group[key] for key in ADDED_KEYS if key in group}
        group = {key: value for key, value in group.items() if key not in ADDED_KEYS}
        return {**_with_state_dtype(group, _dtype_name), _CARRIER: json.dumps(header, default=operator.index)}

    if skipped_steps := optimizer.skipped_steps:
        state_dict["param_groups"][0][SKIPPED_STEPS] = skipped_steps
    zero_low_bits_of_other_weights(state_dict["state"], numbered_parameters(optimizer, state_dict))
    saved = {
        **state_dict,
        "param_groups": [saved_group(group) for group in state_dict["param_groups"]],
        "state": _map_states(state_dict["state"], _in_saved_dtype),
    }
    kept = {
        number: low_bits
        for param, number in numbered_parameters(optimizer, state_dict)
        if not is_sharded(param) and low_bits_state(optimizer.state.get(param, {})) is None
        if (low_bits := low_bits_to_save(param)) is not None
    }
    return {**saved, LOW_BITS: kept} if kept else saved


def from_saved_form(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Invert `to_saved_form`; groups with a header have it under the key `HEADER`. States may be missing.

    Raises:
        ValueError: a header is damaged, or has another format.
    """

    def loaded_group(group: ParamGroup) -> ParamGroup:
        group = _with_state_dtype(group, dtype_of)
        carried = group.get(_CARRIER)
        if not isinstance(carried, str) or not carried.startswith("{"):
            return group
        try:
            header = json.loads(carried)
            for key, value in header.items():
                if not isinstance(value, _CARRIED.get(key, ())):
                    raise ValueError(f"{key} is {value!r}")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"state_rounding of a param group is damaged, or another version of hf_lowprec saved it: "
                f"{error or type(error).__name__}"
            ) from None
        if header.get("format") != FORMAT:
            raise ValueError(
                f"a param group of the state dict has format {header.get('format')}, but this hf_lowprec reads format "
                f"{FORMAT}; resume with the version that saved it, or upgrade hf_lowprec"
            )
        outside = {key: header.pop(key) for key in (_CARRIER, *ADDED_KEYS) if key in header}
        return {**group, _CARRIER: None, **outside, HEADER: header}

    return {
        **state_dict,
        "param_groups": [loaded_group(group) for group in state_dict["param_groups"]],
        "state": _map_states(state_dict.get("state", {}), in_own_dtype),
    }


def _in_saved_dtype(name: str, value: Tensor) -> Tensor:
    """Return a view of the state as it is saved, see `_BYTES`."""
    if value.dtype != torch.int16:
        return value
    return dtensor_like(local_shard(value).unsqueeze(-1).view(torch.uint8), value, (*value.shape, _BYTES))


def in_own_dtype(name: str, saved: Tensor) -> Tensor:
    """Return a view of the saved state `name` in the dtype of its numbers; the inverse of `_in_saved_dtype`."""
    own = AUXILIARY_STATES[name].dtype if name in AUXILIARY_STATES else None
    if own != torch.int16 or saved.dtype != torch.uint8 or saved.shape[-1:] != (_BYTES,):
        return saved
    return dtensor_like(local_shard(saved).view(own).squeeze(-1), saved, saved.shape[:-1])


def _map_states(states: Mapping[Any, Any], change: Callable[[str, Tensor], Tensor]) -> dict[Any, Any]:
    """Copy the dictionaries in `states`, with each tensor replaced."""
    return {
        number: {key: change(key, value) if isinstance(value, Tensor) else value for key, value in state.items()}
        if isinstance(state, Mapping)
        else state
        for number, state in states.items()
    }


def _dtype_name(value: Any) -> Any:
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def _with_state_dtype(group: ParamGroup, convert: Callable[[Any], Any]) -> ParamGroup:
    """Return `group` with each dtype in its `state_dtype` converted; `state_dtype` may be a mapping."""
    value = group.get("state_dtype")
    value = {k: convert(v) for k, v in value.items()} if isinstance(value, Mapping) else convert(value)
    return {**group, "state_dtype": value} if "state_dtype" in group else group


def algorithm_name(optimizer: Algorithm) -> str:
    """Return the name of the optimizer's algorithm: its class in `algorithms/`, which users may have subclassed."""
    classes = (cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("hf_lowprec.optim.algorithms."))
    return next(classes, type(optimizer)).__name__


def numbered_parameters(optimizer: Algorithm, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    """Yield each parameter of `optimizer`, and its number in `state_dict`."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        yield from zip(group["params"], saved["params"], strict=True)


# Formats of other libraries.

OptimizerState = dict[str, Any]
"""A parameter's entry in `state_dict["state"]`."""

START_AGAIN = (
    "start with fresh state: load only the model's weights, and leave out optimizer.load_state_dict (under Trainer: "
    "model = from_pretrained(checkpoint, dtype='float32'), then train() without resume_from_checkpoint)"
)

_DROPPED_UNLESS_OURS = {
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
        hyperparameters: `(saved group, algorithm) -> keys to replace`; raises ValueError with the reason if the formula
            differs from the algorithm's.
        states: `state -> state` with the names and shapes that the algorithm uses.
    """

    library: str
    algorithms: tuple[str, ...]
    marks: str
    lacks: str = ""
    hyperparameters: Callable[[ParamGroup, str], ParamGroup] = lambda saved, algorithm: {}
    states: Callable[[OptimizerState], OptimizerState] = lambda state: state

    def convert_group(self, algorithm: str, own: ParamGroup, saved: ParamGroup, where: str) -> ParamGroup:
        """Return the group `saved` with the keys of `own`, a param group of the optimizer that loads it.

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
        kept = {key: value for key, value in saved.items() if key in own or key not in _DROPPED_UNLESS_OURS}
        # "nearest" has no states of its own that would be missing. The loading optimizer's mode is restored later.
        return {**own, **kept, **replaced, "rounding": "nearest"}

    def convert_state(self, state: OptimizerState) -> OptimizerState:
        """Convert a parameter's saved `state` to this optimizer's names and values; empty if it was never stepped."""
        converted = {name: value for name, value in self.states(dict(state)).items() if value is not None}
        # SGD does not count steps; it matters only whether there was one.
        return {"step": 1, **converted} if converted else {}


def foreign_format(algorithm: str, saved: ParamGroup, where: str) -> ForeignFormat | None:
    """Return the format of the other library that saved the group; None if the `algorithm` here saved it.

    Raises:
        ValueError: neither saved it.
    """
    if HEADER in saved:
        if (writer := saved[HEADER].get("optimizer")) != algorithm:
            raise ValueError(
                f"the state of {writer} cannot be loaded into {algorithm}: resume with {writer}, or start a new "
                f"{algorithm} from the checkpoint's weights alone (from_pretrained with its folder, without "
                "resume_from_checkpoint)"
            )
        return None
    if not {"rounding", "state_rounding"} & saved.keys():
        for known in FOREIGN_FORMATS:
            if saved.keys() >= {*known.marks.split()} and saved.keys().isdisjoint(known.lacks.split()):
                return known
    raise ValueError(
        f"{where} of the state dict was saved neither by this version's hf_lowprec.{algorithm} nor by an optimizer "
        f"whose state can be converted. Resume it with the optimizer that saved it, or {START_AGAIN}"
    )


def _torch_adam(saved: ParamGroup, algorithm: str) -> ParamGroup:
    """Convert Adam and AdamW; before torch 2.7, only the class tells them apart."""
    decoupled = saved.get("decoupled_weight_decay", algorithm == "AdamW")
    if algorithm == "AdamW" and saved["weight_decay"] and not decoupled:
        raise ValueError("an L2 penalty as weight decay; load it into Adam")
    return {"decoupled_weight_decay": decoupled} if algorithm == "Adam" else {}


def _torch_muon(saved: ParamGroup, algorithm: str) -> ParamGroup:
    """Convert Muon. Its `eps` is the Newton–Schulz iteration's; AdamW's has no effect on matrices."""
    return {"ns_eps": saved["eps"], "eps": 1e-8, "adjust_lr_fn": saved["adjust_lr_fn"] or "original"}


def _transformers_adafactor(saved: ParamGroup, algorithm: str) -> ParamGroup:
    """Convert Adafactor, whose largest relative step is always 10⁻²."""
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


FOREIGN_FORMATS = (
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
    ForeignFormat("torch.optim.Muon", ("Muon",), "ns_coefficients eps adjust_lr_fn", hyperparameters=_torch_muon),
    ForeignFormat(
        "transformers.Adafactor",
        ("Adafactor",),
        "clip_threshold decay_rate beta1 warmup_init",
        hyperparameters=_transformers_adafactor,
        states=_transformers_adafactor_states,
    ),
)
"""Every format that is converted."""
