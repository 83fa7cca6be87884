"""Fine-tune with one optimizer at a constant learning rate; record losses and weights."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from first_steps.optimizers import FP32, prepare
from first_steps.tasks import Task
from hf_lowprec import fp32_state_dict


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Attributes:
        losses: step → validation loss of the stored weights, computed in FP32.
        start: the FP32 weights before training, as one vector.
        stored: the weights after training.
        estimate: the same with the compensation, from `fp32_state_dict`.
    """

    losses: dict[int, float]
    start: Tensor
    stored: Tensor
    estimate: Tensor


def train(task: Task, name: str, lr: float, seed: int, steps: int, evaluate_at: Sequence[int]) -> Run:
    """Fine-tune a new model with the optimizer called `name`.

    The validation loss is computed in FP32 for every optimizer, so that it differs by the weights alone and not by
    the rounding of activations.
    """
    model = task.build(seed).train()
    in_fp32 = deepcopy(model).eval()
    start = _vector(model.state_dict(), model)
    optimizer = prepare(model, name, lr, seed)
    losses = {0: _loss(model, in_fp32, task)}
    for step, batch in enumerate(task.batches(seed, steps), start=1):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in evaluate_at:
            losses[step] = _loss(model, in_fp32, task)
    stored = model.state_dict()
    estimate = stored if name == FP32 else fp32_state_dict(model, optimizer)
    return Run(losses, start, _vector(stored, model), _vector(estimate, model))


def distances(run: Run, reference: Run) -> dict[str, float]:
    """How far a run ends from FP32's, in units of FP32's displacement."""
    displacement = (reference.stored - reference.start).norm()
    return {
        kind: float((getattr(run, kind) - reference.stored).norm() / displacement) for kind in ("estimate", "stored")
    }


@torch.no_grad()
def _loss(model: nn.Module, in_fp32: nn.Module, task: Task) -> float:
    """Mean validation loss of the stored weights of `model`, computed by the FP32 model `in_fp32`."""
    in_fp32.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    return sum(in_fp32(**batch).loss.item() for batch in task.validation) / len(task.validation)


def _vector(weights: dict[str, Tensor], model: nn.Module) -> Tensor:
    """The parameters among `weights`, joined, FP64."""
    return torch.cat([weights[name].double().flatten() for name, _ in model.named_parameters()])
