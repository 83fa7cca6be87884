"""Training of a few odd tensors with every algorithm, rounding mode and option, on one backend."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_lowprec
from tests.golden.exact import Shape, digest, gradient, orthogonal_gradient, sparse_gradient, weights
from tests.support.optim import every_optimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALGORITHMS = {cls.__name__: cls for cls, _ in map(hf_lowprec.optimizer_factory, hf_lowprec.OPTIMIZER_NAMES)}
MODES = ("kahan", "split", "stochastic", "nearest")
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}

OPTIONS: dict[str, list[dict[str, Any]]] = {
    **every_optimizer.OPTIONS,
    "AdamW": [{"weight_decay": 0.1}, {"amsgrad": True}, {"betas": (0.0, 0.5), "eps": 1e-4}],
    # Whatever rounds the products of two steps with these coefficients, and in which order, gets the same bits. Without
    # momentum, or with an FP32 one, elements of one size stay so: BF16 states are rounded stochastically.
    "Muon": [
        {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 2, "momentum": 0.0},
        {"nesterov": False, "adjust_lr_fn": "original", "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 1}
        | {"momentum": 0.95, "state_dtype": FP32},
    ],
}
"""Options of each algorithm: the first go with every mode and case, each of the others with Kahan summation."""

TENSORS: dict[str, tuple[torch.dtype, list[Shape]]] = {
    "bf16": (BF16, [(33, 7), (1025,), (5,), (), (0,), (3, 4, 5), (6, 5)]),
    "norm": (FP32, [(13,), (1,)]),
    "fp16": (FP16, [(9,), (4, 6)]),
}
FOUR_TENSORS = {"bf16": (BF16, [(33, 7), (1025,)]), "norm": (FP32, [(13,)]), "fp16": (FP16, [(9,)])}
LARGE = {"bf16": (BF16, [(257, 129)])}
SMALL = {"bf16": (BF16, [(5, 3)]), "norm": (FP32, [(3,)]), "fp16": (FP16, [(2,)])}


@dataclass(frozen=True)
class Case:
    """How a training goes.

    Attributes:
        options: keyword arguments of the optimizer.
        tensors: label of each parameter group, with the dtype and the shapes of its parameters.
        torch_clips: whether `torch.nn.utils.clip_grad_norm_` clips, by a norm of gradients that is exact.
        own_clip: whether the optimizer's `clip_grad_norm_` is called before each step.
        infinite: steps at which one gradient is not finite.
        steps: after which steps digests are taken.
    """

    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[torch.dtype, list[Shape]]] = field(default_factory=lambda: TENSORS)
    torch_clips: bool = False
    own_clip: bool = False
    infinite: tuple[int, ...] = ()
    steps: tuple[int, ...] = (10,)


CASES = {
    "mixed dtypes": Case(steps=(3, 50)),
    "clipped inside the step": Case({"max_grad_norm": 0.5, "skip_nonfinite": True}, infinite=(2, 7), steps=(3, 50)),
    "clipped by the optimizer": Case(own_clip=True, steps=(50,)),
    "clipped by torch": Case(tensors=FOUR_TENSORS, torch_clips=True, steps=(50,)),
    "FP32 states": Case({"state_dtype": FP32}),
    "states to nearest": Case({"state_rounding": "nearest"}),
    "large": Case(tensors=LARGE, steps=(3,)),
}
"""Cases of every algorithm and mode."""


def cases(algorithm: str, mode: str) -> Iterator[tuple[str, Case]]:
    """Every case of an algorithm in a mode, by its name."""
    yield from CASES.items()
    yield "other seed", Case({"seed": 7, "first_parameter": 100}, steps=(3,))
    if mode != "kahan":
        return
    yield "maximize", Case({"maximize": True})
    for options in OPTIONS[algorithm][1:]:
        yield ", ".join(f"{key}={value}" for key, value in options.items()), Case(options)


class Training:
    """A model that only holds tensors, and its optimizer."""

    def __init__(self, algorithm: str, mode: str, backend: str, case: Case) -> None:
        self.case, self.muon, self.numbers = case, algorithm == "Muon", iter(range(1000))
        self.model = nn.ModuleDict(
            {label: self._parameters(*which, DEVICE.get(backend, "cpu")) for label, which in case.tensors.items()}
        )
        groups = [{"params": list(holder.parameters())} for holder in self.model.values()]
        for group, label in zip(groups, case.tensors, strict=True):
            group |= {"weight_decay": 0.0} if label == "norm" else {}
            # FP16 parameters have none of these modes, so their group asks for another.
            group |= {"rounding": "kahan"} if label == "fp16" and mode in ("split", "stochastic") else {}
        options = {**OPTIONS[algorithm][0], **case.options}
        if self.muon:
            options["matrices"] = [param for param in self.model.parameters() if param.ndim in (2, 3)]
        self.optimizer = ALGORITHMS[algorithm](groups, lr=2.0**-9, rounding=mode, backend=backend, **options)
        self.keys = {param: key for key, param in enumerate(self.model.parameters())}
        self.norms: list[Tensor] = []

    def _parameters(self, dtype: torch.dtype, shapes: list[Shape], device: str) -> nn.ParameterList:
        return nn.ParameterList(self._parameter(dtype, shape, device) for shape in shapes)

    def _parameter(self, dtype: torch.dtype, shape: Shape, device: str) -> nn.Parameter:
        values = weights(shape, next(self.numbers)).to(dtype).to(device)
        if shape == (6, 5):  # one whose memory is that of its transpose
            values = values.t().contiguous().t()
        return nn.Parameter(values)

    def step(self, step: int) -> None:
        """Take step number `step`, from 1; the learning rate changes every time."""
        for param, key in self.keys.items():
            matrix = self.muon and param.ndim in (2, 3)
            kind = orthogonal_gradient if matrix else sparse_gradient if self.case.torch_clips else gradient
            param.grad = kind(tuple(param.shape), param.dtype, key, step).to(param.device, copy=True)
        if step in self.case.infinite:
            next(iter(self.keys)).grad.view(-1)[0] = torch.inf
        if self.case.torch_clips:
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3))
        if self.case.own_clip:
            self.norms.append(self.optimizer.clip_grad_norm_(0.7))
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = 2.0**-9 * (1 + (step + number) % 4)
        self.optimizer.step()

    def run(self, steps: range) -> None:
        for step in steps:
            self.step(step)

    def digests(self) -> dict[str, str]:
        """Of weights, states and, where gradients are clipped, norms; one for each group and kind."""
        found = {"norms": digest(self.norms)} if self.norms else {}
        for label, holder in self.model.items():
            params = list(holder.parameters())
            found[f"{label} weight"] = digest(params)
            states = [self.optimizer.state[param] for param in params]
            for kind in sorted({kind for state in states for kind in state} - {"step"}):
                found[f"{label} {kind}"] = digest(state[kind] for state in states if kind in state)
        return found

    def layout(self) -> dict[str, Any]:
        """Names, dtypes and shapes of `state_dict()`, what its groups say, and `fp32_state_dict`."""
        saved = self.optimizer.state_dict()
        states = {
            str(number): {name: f"{str(value.dtype)[6:]} {list(value.shape)}" for name, value in state.items()}
            for number, state in saved["state"].items()
        }
        # Through JSON, as the recording is: pairs become lists.
        first, *others = json.loads(json.dumps(saved["param_groups"], default=str))
        different = [{key: value for key, value in group.items() if first.get(key) != value} for group in others]
        estimates = hf_lowprec.fp32_state_dict(self.model, self.optimizer)
        return {
            "keys": list(saved),
            "state": states,
            "first group": first,
            "in the other groups": different,
            "fp32_state_dict": {name: f"{str(value.dtype)[6:]} {digest([value])}" for name, value in estimates.items()},
        }


def record(algorithm: str, mode: str, backend: str) -> dict[str, Any]:
    """Digests of every case after its steps."""
    found: dict[str, Any] = {}
    for name, case in cases(algorithm, mode):
        training, done = Training(algorithm, mode, backend, case), 0
        found[name] = {}
        for step in case.steps:
            training.run(range(done + 1, step + 1))
            found[name][f"step {step}"] = training.digests()
            done = step
    return found


def record_layout(algorithm: str, mode: str) -> dict[str, Any]:
    """The layout of state dicts after three steps on `SMALL`."""
    training = Training(algorithm, mode, "eager", Case(tensors=SMALL))
    training.run(range(1, 4))
    return training.layout()


CHECKPOINTS = Path(__file__).with_name("checkpoints")
"""State dicts that an earlier commit wrote together with the recording: weights and states after three steps."""


def checkpoint_path(algorithm: str, mode: str, folder: Path = CHECKPOINTS) -> Path:
    return folder / f"{algorithm.lower()}_{mode}.pt"


def write_checkpoint(algorithm: str, mode: str, folder: Path = CHECKPOINTS) -> None:
    """Train for three steps and save."""
    training = Training(algorithm, mode, "eager", Case(tensors=SMALL))
    training.run(range(1, 4))
    saved = {"weights": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    torch.save(saved, checkpoint_path(algorithm, mode, folder))


def record_checkpoint(algorithm: str, mode: str, backend: str, folder: Path = CHECKPOINTS) -> dict[str, Any]:
    """Digests right after loading the saved file, and after one more step; loading it warns of nothing."""
    training = Training(algorithm, mode, backend, Case(tensors=SMALL))
    saved = torch.load(checkpoint_path(algorithm, mode, folder), weights_only=True)
    training.model.load_state_dict(saved["weights"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.optimizer.load_state_dict(saved["optimizer"])
    loaded = {**training.digests(), "step": digest(state["step"] for state in training.optimizer.state.values())}
    training.step(4)
    return {"loaded": loaded, "after one more step": training.digests()}
