"""State dicts of this library, converted to those of torch's own optimizers.

torch's optimizers have neither compensations nor remainders. FP32 weights take in what they hold; 16-bit weights
cannot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.optim.state.imported_states import START_AGAIN
from hf_lowprec.optim.state.low_bits import fp32_values, low_bits_state
from hf_lowprec.optim.state.state_dict_format import HEADER, dither_streams, from_saved_form
from hf_lowprec.optim.state.states_in_8_bits import decoded_states
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name
from hf_lowprec.rounding.modes import LOW_BITS_STATES

_CLASSES: dict[type, str] = {
    cls: cls.__name__ for cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.RAdam, torch.optim.SGD)
}
"""The classes of torch that are converted for, and the algorithms whose state they can use."""


class ForTorch(NamedTuple):
    """A converted state dict.

    Attributes:
        state_dict: as the optimizer of torch loads it.
        weights: for each parameter that has a compensation or remainder, its value with that: FP32 of its shape.
    """

    state_dict: dict[str, Any]
    weights: list[tuple[Tensor, Tensor]]

    @without_grad
    def load_weights(self) -> None:
        """Give the parameters these values."""
        for param, value in self.weights:
            param.copy_(value)


def is_ours(state_dict: dict[str, Any]) -> bool:
    """Return whether this library has saved the optimizer state dict `state_dict`."""
    return all({"rounding", "state_rounding"} <= group.keys() for group in state_dict.get("param_groups", [{}]))


def convert_for_torch(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> ForTorch:
    """Convert `state_dict`, which this library has saved, for torch's `optimizer`, whose weights are loaded already.

    Raises:
        ValueError: the optimizer is of another algorithm, its weights are in 16 bits or sharded and would lose what a
            compensation or remainder holds, or the state dict does not fit.
    """
    name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    state_dict = from_saved_form(state_dict)
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    writers = {group.get(HEADER, {}).get("optimizer", "optimizer") for group in saved_groups}
    if writers != {_CLASSES.get(type(optimizer))}:
        writer = " and ".join(sorted(writers))
        raise ValueError(
            f"the state of hf_lowprec's {writer} cannot be loaded into {name}: resume with the optim= it was saved "
            f"with, or {START_AGAIN}"
        )
    lengths, saved_lengths = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
    if lengths != saved_lengths:
        raise ValueError(
            f"the state dict has param groups of {saved_lengths} parameters, but this {name} has {lengths}; give the "
            "optimizer the same groups in the same order"
        )
    states: dict[Any, Any] = {}
    weights: list[tuple[Tensor, Tensor]] = []
    dithers = dither_streams(saved_groups)
    for group, saved in zip(groups, saved_groups, strict=True):
        for param, number in zip(group["params"], saved["params"], strict=True):
            state = dict(state_dict["state"].get(number, {}))
            low_bits = low_bits_state(state)
            if low_bits is not None:
                weight = _weight_in_16_bits(param, name)
                weights.append((param, fp32_values(weight, low_bits.to(param.device), dithers.get(number))))
                state = {name: value for name, value in state.items() if name not in LOW_BITS_STATES}
            if state:
                states[number] = _state(state, group)
    torchs_keys = [
        {key: saved.get(key, value) for key, value in group.items()}
        for group, saved in zip(groups, saved_groups, strict=True)
    ]
    return ForTorch({**state_dict, "state": states, "param_groups": torchs_keys}, weights)


def _state(state: dict[str, Any], group: ParamGroup) -> dict[str, Any]:
    """FP32 states, as torch's optimizers name them; its SGD does not count steps."""
    step: dict[str, Tensor] = {}
    if "dampening" not in group:
        step["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
    tensors = {name: value for name, value in state.items() if name != "step" and isinstance(value, Tensor)}
    return step | {name: value.float() for name, value in decoded_states(tensors).items()}


def _weight_in_16_bits(param: Tensor, name: str) -> Tensor:
    """The weight that low bits belong to: the FP32 `param`, which has a 16-bit value, in its 16-bit dtype.

    Raises:
        ValueError: `param` cannot take in low bits, or has another value.
    """
    if is_sharded(param) or param.dtype != torch.float32:
        what = "sharded" if is_sharded(param) else dtype_name(param.dtype)
        raise ValueError(
            f"this checkpoint holds low bits of its weights, which {what} weights under {name} would lose: load the "
            "model in FP32 (from_pretrained with dtype='float32', no FSDP), resume with the optim= it was saved with, "
            f"or {START_AGAIN}"
        )
    for weight in map(param.detach().to, LOW_PRECISION_DTYPES):
        if torch.equal(weight.float(), param):
            return weight
    raise ValueError(
        "the model's weights are not the 16-bit weights of this checkpoint, to which its optimizer state belongs; load "
        "the checkpoint's weights first"
    )
