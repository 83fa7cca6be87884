"""The change that any other optimizer makes to sampled weights before rounding: its own step, on samples in FP64.

A clone of the optimizer gets parameters that are the matrices of samples, with their gradients and states, and steps
them. So no formula has to be known, but each element must be stepped independently of all others. Optimizers that
factorize, orthogonalize, scale by norms of whole tensors or quantize in blocks are recognized by their states, by their
names and, if neither tells, by updates that disagree with what the weights did.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.monitor.exact_update import SECOND_MOMENTS, ExactUpdate
from hf_lowprec.monitor.parameter_samples import ParameterSamples
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.state.states_of_other_libraries import COMPENSATIONS
from hf_lowprec.rounding.low_bits import fp64_value

NOT_ELEMENTWISE = (
    *("adafactor", "muon", "lamb", "lars", "lbfgs", "shampoo", "soap", "novograd", "galore", "prodigy", "dadapt"),
    *("stableadamw", "adamuon", "came", "apollo", "sm3", "adalomo", "sparseadam", "8bit", "4bit", "fp8"),
)
"""Parts of the names of classes whose update of an element depends on other elements, or that store codes."""


_ENOUGH_TO_COMPARE = 32
"""Elements whose updates are well above the spacing, from which on they tell whether a replay is right."""


class ReplayRefused(Exception):
    """The optimizer's update cannot be computed on a sample; the message says why."""


def refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the update of `optimizer` cannot be computed on a sample; None if its class does not tell."""
    cls = type(optimizer)
    name = cls.__name__.lower()
    if any(part in name for part in NOT_ELEMENTWISE):
        return f"{cls.__name__} does not update each element by itself"
    if cls.__module__.partition(".")[0] == "bitsandbytes":
        return f"{cls.__module__}.{cls.__name__} runs kernels for whole tensors"
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{cls.__name__} needs a closure"
    return None


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's own, which round to nearest."""
    return type(optimizer).__module__.startswith("torch.optim.")


class ReplayedUpdates:
    """Computes exact updates of parameters that share their group, dtype, device, state names and step count.

    Args:
        optimizer: the optimizer that steps them.
        params: the parameters.
        group: their group.
        samples: their samples.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Tensor],
        group: dict[str, Any],
        samples: ParameterSamples,
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self.group = group
        self.samples = samples
        self.weights = list(map(local_shard, params))

    def compute(self, with_decay: bool) -> ExactUpdate:
        """Compute the changes of the coming step; its gradients are final.

        Args:
            with_decay: whether to compute the part of the weight decay.

        Raises:
            ReplayRefused: a state does not have the shape of its parameter, or the clone cannot step.
        """
        stored_weight = self.samples.gather(self.weights, "weight")
        grad = self.samples.gather([local_shard(param.grad) for param in self.params])  # type: ignore[arg-type]
        state = self.gather_state()
        wide = {name: value.double() if is_matrix(value) else value for name, value in state.items()}
        weight = stored_weight.double()
        new_weight, new_state = replay(self.optimizer, self.group, weight, grad.double(), wide)
        for name, value in new_state.items():  # created by the first step
            if isinstance(value, Tensor) and value.shape == weight.shape and not is_plain(value):
                raise ReplayRefused(f"the state {name!r} is stored as codes")
        may_be_random = not is_of_torch(self.optimizer)
        exact = ExactUpdate(
            weight=stored_weight.float(),
            random_weights=may_be_random,
            random_states=may_be_random,
            stored=fp64_value(weight, compensation_of(state)),
            # Some add the compensation to FP64 weights, too.
            update=fp64_value(new_weight, compensation_of(new_state)) - fp64_value(weight, compensation_of(wide)),
        )
        for name in SECOND_MOMENTS:
            if is_matrix(new_state.get(name)):
                before = wide.get(name)
                exact.second_moment = name, torch.zeros_like(weight) if before is None else before, new_state[name]
        if with_decay and self.group.get("weight_decay"):
            undecayed, _ = replay(self.optimizer, self.group, weight, grad.double(), wide, weight_decay=0)
            exact.decay = new_weight - undecayed
            narrow, narrow_state = replay(self.optimizer, self.group, stored_weight, grad, state, weight_decay=0)
            exact.stored_without_decay = fp64_value(narrow, compensation_of(narrow_state))
        return exact

    def stored_state(self, name: str) -> Tensor | None:
        """Gather a state as it is stored now; None if there is none of that name."""
        states = [self.optimizer.state.get(param, {}) for param in self.params]
        if not all(is_elementwise(s.get(name), p) for s, p in zip(states, self.params, strict=True)):
            return None
        return self.samples.gather([local_shard(state[name]) for state in states], name)

    def gather_state(self) -> dict[str, Any]:
        """The states by name: matrices of samples, and values that all parameters share."""
        states = [self.optimizer.state.get(param, {}) for param in self.params]
        gathered: dict[str, Any] = {}
        for name, value in states[0].items():
            if is_elementwise(value, self.params[0]):
                gathered[name] = self.samples.gather([local_shard(state[name]) for state in states], name)
            else:
                gathered[name] = value
        return gathered


def is_matrix(value: Any) -> bool:
    """Whether a state is a matrix of samples."""
    return isinstance(value, Tensor) and value.dim() == 2


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor, or its local shard, is a floating-point one whose elements are in memory as they are."""
    return tensor.is_floating_point() and type(local_shard(tensor)) in (Tensor, nn.Parameter)


def is_elementwise(value: Any, param: Tensor) -> bool:
    """Whether a state is a plain tensor with one number for each element of its parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape and is_plain(value)


def compensation_of(state: dict[str, Any]) -> Tensor | None:
    """The compensation among the states, if there is one."""
    return next((state[name] for name in COMPENSATIONS if is_matrix(state.get(name))), None)


def agreement(update: Tensor, change: Tensor, ulp: Tensor) -> Tensor:
    """How many updates, among those that rounding leaves recognizable, agree with what the weights did.

    An update of 8 spacings keeps more than three quarters of its size whichever way it is rounded, even if the
    optimizer computes in 16 bits. If an optimizer scales updates by something that a sample does not show, they differ.

    Args:
        update: the updates of a replay, FP64.
        change: the changes of what is stored.
        ulp: the spacing of the weights.

    Returns:
        FP64 of shape (2): how many can be compared, and how many of them agree.
    """
    comparable = torch.maximum(update.abs(), change.abs()) > 8 * ulp
    agrees = (update - change).abs() <= 2 * ulp + update.abs() / 4
    return torch.stack([comparable.sum(), (comparable & agrees).sum()]).double()


def is_refuted(counts: Tensor) -> bool:
    """Whether most updates of a replay disagree with what the weights did; `counts` are those of `agreement`."""
    comparable, agree = counts.tolist()
    return bool(comparable >= _ENOUGH_TO_COMPARE and agree < comparable / 2)


def state_signature(state: dict[str, Any], param: Tensor) -> tuple[Any, ...]:
    """A key that parameters must have in common to be stepped as one: the names of their states, and the shared values.

    Raises:
        ReplayRefused: a state is neither a number nor a floating-point tensor of the parameter's shape.
    """
    signature: list[Any] = []
    for name, value in state.items():
        if value is None or isinstance(value, int | float | str):
            signature += (name, value)
        elif is_elementwise(value, param):
            signature += (name, value.dtype)
        elif isinstance(value, Tensor) and value.dim() == 0:
            signature += (name, float(value))
        elif isinstance(value, Tensor) and value.shape == param.shape:
            raise ReplayRefused(f"the state {name!r} is stored as codes")
        else:
            raise ReplayRefused(f"the state {name!r} does not have its parameter's shape")
    return tuple(signature)


def replay(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    **settings: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """The weights and states that a step of `optimizer` gives; nothing that is passed is changed.

    Args:
        optimizer: whose class and attributes are used.
        group: the parameter group.
        weight: matrix of weights.
        grad: their gradients.
        state: their states; values other than tensors are shared.
        **settings: hyperparameters to replace.

    Raises:
        ReplayRefused: the step raises an error, or could change tensors that the optimizer keeps elsewhere.
    """
    own = {name: value for name, value in vars(optimizer).items() if _belongs_to_clone(name, value)}
    for name, value in own.items():
        if _contains_tensors(value):
            raise ReplayRefused(f"its step may change the tensors in its attribute {name!r}")
    param = nn.Parameter(weight.clone())
    if grad.dtype != weight.dtype:
        param.grad_dtype = None  # any
    param.grad = grad.clone()
    clone = object.__new__(type(optimizer))
    values = {name: _copied(value) for name, value in state.items()}
    shared = {name: _copied(value) for name, value in group.items() if name != "params"}
    try:
        clone.__setstate__(
            {
                **{name: _copied(value) for name, value in own.items()},
                "defaults": dict(optimizer.defaults),
                "state": defaultdict(dict, {param: values} if values else {}),
                "param_groups": [{**shared, **settings, "params": [param]}],
            }
        )
        with _global_state_kept(param.device), torch.enable_grad():
            type(clone).step(clone)
    except Exception as error:  # of any library's code
        raise ReplayRefused(f"its step cannot be repeated on a sample: {error!r}") from error
    return param.detach(), dict(clone.state[param])


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _belongs_to_clone(name: str, value: Any) -> bool:
    """True if a clone gets the attribute; methods that schedulers and others have replaced would step the original."""
    if name in ("defaults", "state", "param_groups"):  # the clone has its own
        return False
    return not callable(value) and "hook" not in name and not isinstance(value, OrderedDict | torch.optim.Optimizer)


def _contains_tensors(value: Any) -> bool:
    """Whether a container has tensors in it; a clone would share them with the original."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if not isinstance(value, list | tuple | set):
        return False
    return any(isinstance(item, Tensor) or _contains_tensors(item) for item in value)


@contextmanager
def _global_state_kept(device: torch.device) -> Iterator[None]:
    """Leaves torch's random generators as they were, and compiles nothing."""
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    eager: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.random.fork_rng(devices, device_type=kind), eager:
        yield
