"""State dicts of other libraries' optimizers, converted to those of the same algorithm here.

A state dict does not name its optimizer, so formats are recognized by the keys of their param groups. A format is
converted if it stores plain tensors and its formula is the same as here, up to rounding. Hyperparameters are taken
over, the states get this optimizer's `state_dtype` (rounded to nearest), and settings that exist only here stay as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.arguments import check_range
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.rounding.modes import LOW_BITS_STATES

OptimizerState = dict[str, Any]
"""A parameter's entry in `state_dict["state"]`."""

COMPENSATIONS = (*LOW_BITS_STATES, "kahan_comp")
"""Names of the states that are a part of the weight, here and in torch-optimi, whose compensation has our sign."""

START_AGAIN = (
    "start with fresh state: load only the model's weights, and leave out optimizer.load_state_dict (under Trainer: "
    "model = from_pretrained(checkpoint, dtype='float32'), then train() without resume_from_checkpoint)"
)

_IMPLEMENTATION = "foreach fused capturable differentiable"
"""Keys with which torch's optimizers choose an implementation."""

_OPTIMI = "kahan_sum foreach triton gradient_release setup step beta1 beta2 decouple_lr decouple_wd max_lr torch_init"
"""Keys of optimi's optimizers that have another name here, or no meaning."""


@dataclass(frozen=True)
class ForeignFormat:
    """A format in which other optimizers save their state. Keys are separated by spaces.

    Attributes:
        library: its name in messages.
        algorithms: the algorithms here that compute the same.
        marks: keys that its param groups have.
        lacks: keys that its param groups do not have.
        dropped: keys of its param groups that have no meaning here.
        hyperparameters: `(saved group, algorithm) -> keys to replace`; raises ValueError, with the reason as message,
            if the formula differs from the algorithm's.
        states: `(state, saved group) -> state` with the names and values that the algorithm uses; empty if the
            optimizer has not stepped the parameter.
    """

    library: str
    algorithms: tuple[str, ...]
    marks: str
    lacks: str = ""
    dropped: str = ""
    hyperparameters: Callable[[ParamGroup, str], ParamGroup] = lambda saved, algorithm: {}
    states: Callable[[OptimizerState, ParamGroup], OptimizerState] = lambda state, saved: state

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
        kept = {key: value for key, value in saved.items() if key not in self.dropped.split()}
        # "nearest" requires no state of a rounding mode; one that is there continues to be used.
        return {**own, **kept, **replaced, "rounding": "nearest"}

    def state(self, param: Tensor, saved: ParamGroup, state: OptimizerState, where: str) -> OptimizerState:
        """A parameter's saved `state`, with the names and values of this optimizer.

        Args:
            param: the parameter that gets it.
            saved: its group in the state dict.
            state: the state.
            where: its name in messages.

        Raises:
            ValueError: a state is not a plain tensor, or the compensation has no place in an FP32 weight.
        """
        _check_plain(state, where, self.library)
        converted = {name: value for name, value in self.states(dict(state), saved).items() if value is not None}
        if not converted:
            return {}
        if _is_placeholder(converted.get("compensation"), param):
            del converted["compensation"]
        if param.dtype == torch.float32 and "compensation" in converted:
            raise ValueError(
                f"{where} of the state dict has a compensation, but is float32 here; when the weights are loaded, add "
                "it to them: param.data.add_(state_dict['state'][k].pop('kahan_comp'))"
            )
        step = converted.pop("step", 1)  # not counted by algorithms that do not depend on it, apart from the first
        if "compensation" in converted:
            converted["compensation"] = converted["compensation"].to(torch.bfloat16)
        return {"step": step, **converted}


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


def _is_placeholder(compensation: Tensor | None, param: Tensor) -> bool:
    """Return whether it is the one element that optimi's Triton kernels (0.3) get for a weight without compensation."""
    if compensation is None or compensation.numel() != 1:
        return False
    return compensation.shape != param.shape or compensation.dtype not in (torch.bfloat16, torch.float16)


def _check_plain(state: OptimizerState, where: str, library: str) -> None:
    """Raise ValueError if a state is stored in other numbers than its own."""
    quantized = [name for name in state if "::" in name]
    quantized += [
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and type(local_shard(value)) not in (Tensor, nn.Parameter)
    ]
    if quantized:
        raise ValueError(
            f"{where} of the state dict, saved by {library}, has the quantized states {', '.join(quantized)}; save "
            f"them as plain tensors (flashoptim: compress_state_dict=False, torchao: .dequantize()), or {START_AGAIN}"
        )
    if "error_bits" in state:
        raise ValueError(
            f"{where} of the state dict, saved by {library}, has error_bits, which belong to the weights; cast the "
            "weights that get_fp32_model_state_dict returns, and take error_bits out of the state dict"
        )


def _decay_mode(decoupled: bool, saved: ParamGroup, algorithm: str) -> ParamGroup:
    """Adam's option for decoupled weight decay. AdamW has no other, so it raises ValueError for an L2 penalty."""
    decay = saved.get("weight_decay")
    check_range("weight_decay", decay, -math.inf)
    if algorithm == "AdamW" and decay and not decoupled:
        raise ValueError("an L2 penalty as weight decay; load it into Adam")
    return {"decoupled_weight_decay": decoupled} if algorithm == "Adam" else {}


def _torch_adam(saved: ParamGroup, algorithm: str) -> ParamGroup:
    # Before torch 2.7, only the class tells Adam from AdamW.
    return _decay_mode(saved.get("decoupled_weight_decay", algorithm == "AdamW"), saved, algorithm)


def _torchao_adamw(saved: ParamGroup, algorithm: str) -> ParamGroup:
    return {key: float(saved[key]) for key in ("lr", "initial_lr") if key in saved}  # it keeps tensors


def _torch_muon(saved: ParamGroup, algorithm: str) -> ParamGroup:
    return {"adjust_lr_fn": saved["adjust_lr_fn"] or "original", "use_muon": True, "ns_eps": saved["eps"]}


def _torch_adafactor(saved: ParamGroup, algorithm: str) -> ParamGroup:
    return {"beta1": None, "relative_step": True, "scale_parameter": True}


def _transformers_adafactor(saved: ParamGroup, algorithm: str) -> ParamGroup:
    """It knows no largest relative step but 10⁻²."""
    if saved["warmup_init"]:
        raise ValueError("warmup_init=True; set it to False and use a scheduler")
    if saved["weight_decay"] and (saved["relative_step"] or saved["scale_parameter"]):
        raise ValueError("a weight decay that relative_step and scale_parameter change; set its weight_decay to 0")
    return {
        "beta2_decay": saved["decay_rate"],
        "d": saved["clip_threshold"],
        "lr": 1e-2 if saved["relative_step"] else saved["lr"],
        "maximize": False,
    }


def _transformers_adafactor_states(state: OptimizerState, saved: ParamGroup) -> OptimizerState:
    rows, columns = state.pop("exp_avg_sq_row", None), state.pop("exp_avg_sq_col", None)
    state.pop("RMS", None)
    state["variance"] = state.pop("exp_avg_sq", None)
    state["row_var"] = None if rows is None else rows.unsqueeze(-1)
    state["col_var"] = None if columns is None else columns.unsqueeze(-2)
    return state


def _betas(saved: ParamGroup) -> ParamGroup:
    return {"betas": (saved["beta1"], saved["beta2"])}


def _optimi_decay(saved: ParamGroup) -> ParamGroup:
    """With `decouple_lr`, weights are multiplied by `1 - lr / max_lr · weight_decay`."""
    return {"weight_decay": saved["weight_decay"] / saved["max_lr"]} if saved["decouple_lr"] else {}


def _optimi_adam(saved: ParamGroup, algorithm: str) -> ParamGroup:
    decoupled = bool(saved["decouple_wd"] or saved["decouple_lr"])
    return {**_betas(saved), **_optimi_decay(saved), **_decay_mode(decoupled, saved, algorithm)}


def _optimi_two_moments(saved: ParamGroup, algorithm: str) -> ParamGroup:
    return {**_betas(saved), **_optimi_decay(saved)}


def _optimi_sgd(saved: ParamGroup, algorithm: str) -> ParamGroup:
    if saved["weight_decay"] and (saved["decouple_wd"] or saved["decouple_lr"]):
        raise ValueError("decoupled weight decay; set its weight_decay to 0 to continue without")
    return {"dampening": saved["momentum"] if saved["dampening"] else 0.0}


def _optimi_states(state: OptimizerState, saved: ParamGroup) -> OptimizerState:
    """optimi's compensation has the sign of ours: it adds it to the weight, and subtracts the weight's change."""
    state = {name: value for name, value in state.items() if name not in ("group", "eps_sq", "mean_square")}
    state["compensation"] = state.pop("kahan_comp", None)
    if "step" in saved:
        state.setdefault("step", saved["step"])
    return state


def _optimi_adam_states(state: OptimizerState, saved: ParamGroup) -> OptimizerState:
    """optimi's moments are divided by the bias correction: `m / (1 - β1ᵗ)`, `v / (1 - β2ᵗ)`."""
    state = _optimi_states(state, saved)
    step = int(state["step"])
    for name, beta in (("exp_avg", saved["beta1"]), ("exp_avg_sq", saved["beta2"])):
        state[name] = state[name].float() * (1 - beta**step)
    return state


def _optimi_sgd_states(state: OptimizerState, saved: ParamGroup) -> OptimizerState:
    state = _optimi_states(state, saved)
    buffer = state.pop("exp_avg", None)
    return {**state, "momentum_buffer": buffer if saved["momentum"] else None}


FORMATS = (
    ForeignFormat(  # or FlashAdam: the state dict does not say
        "flashoptim.FlashAdamW", ("AdamW",), "master_bytewidth betas eps", dropped="master_bytewidth quantize"
    ),
    ForeignFormat(
        "optimi.Adam or optimi.AdamW",
        ("AdamW", "Adam"),
        "kahan_sum beta1 beta2 eps decouple_wd",
        "beta3",
        _OPTIMI,
        _optimi_adam,
        _optimi_adam_states,
    ),
    ForeignFormat(
        "optimi.StableAdamW",
        ("StableAdamW",),
        "kahan_sum beta1 beta2 eps",
        "beta3 decouple_wd",
        _OPTIMI,
        _optimi_two_moments,
        _optimi_states,
    ),
    ForeignFormat(
        "optimi.Lion", ("Lion",), "kahan_sum beta1 beta2", "eps", _OPTIMI, _optimi_two_moments, _optimi_states
    ),
    ForeignFormat("optimi.SGD", ("SGD",), "kahan_sum momentum dampening", "", _OPTIMI, _optimi_sgd, _optimi_sgd_states),
    ForeignFormat(
        "torch.optim.Adam or torch.optim.AdamW",
        ("AdamW", "Adam"),
        "betas eps amsgrad foreach",
        dropped=f"{_IMPLEMENTATION} decoupled_weight_decay",
        hyperparameters=_torch_adam,
    ),
    ForeignFormat(
        "torchao.optim.AdamW",
        ("AdamW",),
        "betas eps amsgrad",
        lacks="foreach correct_bias",
        hyperparameters=_torchao_adamw,
    ),
    ForeignFormat(
        "torch.optim.RAdam",
        ("RAdam",),
        "betas eps decoupled_weight_decay foreach",
        lacks="amsgrad momentum_decay",
        dropped=_IMPLEMENTATION,
    ),
    ForeignFormat("torch.optim.SGD", ("SGD",), "momentum dampening nesterov foreach", dropped=_IMPLEMENTATION),
    ForeignFormat(
        "torch.optim.Muon",
        ("Muon",),
        "momentum nesterov ns_coefficients adjust_lr_fn eps",
        dropped="eps",
        hyperparameters=_torch_muon,
    ),
    ForeignFormat(
        "torch.optim.Adafactor",
        ("Adafactor",),
        "beta2_decay eps d foreach",
        dropped=_IMPLEMENTATION,
        hyperparameters=_torch_adafactor,
    ),
    ForeignFormat(
        "transformers.Adafactor",
        ("Adafactor",),
        "clip_threshold decay_rate beta1 warmup_init",
        dropped="clip_threshold decay_rate warmup_init",
        hyperparameters=_transformers_adafactor,
        states=_transformers_adafactor_states,
    ),
)
"""Every format that is converted. The first one that a group's keys match is used."""
