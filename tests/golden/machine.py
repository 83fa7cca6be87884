"""Results of matrix products, which are the same for one machine and one torch only: compared with another commit's.

    python -m tests.golden.machine FILE

Muon with its default coefficients on dense matrices; losses, logits and gradients of the models of `casting.py`; and a
Llama's weights after five steps of every optimizer. FILE gets the digests as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_lowprec
from tests.golden import casting
from tests.golden.exact import digest, gradient, weights
from tests.golden.steps import ALGORITHMS, MODES

SHAPES = [(33, 7), (16, 64), (3, 12, 20), (5,)]
STEPS = 5


def muon(mode: str) -> dict[str, str]:
    params = [nn.Parameter(weights(shape, key).bfloat16()) for key, shape in enumerate(SHAPES)]
    matrices = [param for param in params if param.ndim > 1]
    optimizer = hf_lowprec.Muon(params, rounding=mode, matrices=matrices)
    for step in range(1, STEPS + 1):
        for key, param in enumerate(params):
            param.grad = gradient(tuple(param.shape), param.dtype, key, step).clone()
        optimizer.step()
    return named({str(shape): param for shape, param in zip(SHAPES, params, strict=True)}, optimizer)


def named(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {}
    for name, param in params.items():
        for kind, value in {"weight": param, **optimizer.state[param]}.items():
            found[f"{name} {kind}"] = digest([value])
    return found


def cast_model(name: str) -> dict[str, str]:
    _, batch, options = casting.MODELS[name]
    model = casting.build(name)
    hf_lowprec.cast_model(model, **options)
    outputs = model(**batch)
    outputs["loss"].backward()
    found = {key: digest([value]) for key, value in outputs.items() if isinstance(value, Tensor)}
    return found | {key: digest([p.grad]) for key, p in model.named_parameters() if p.grad is not None}


def training(algorithm: str, mode: str) -> dict[str, str]:
    model = casting.build("llama")
    hf_lowprec.cast_model(model)
    options: dict[str, Any] = {"matrices": hf_lowprec.hidden_matrices(model)} if algorithm == "Muon" else {}
    options |= {"rounding": mode, "max_grad_norm": 1.0}
    optimizer = ALGORITHMS[algorithm](model.parameters(), **options)
    for _ in range(STEPS):
        model(**casting.TOKENS)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return named(dict(model.named_parameters()), optimizer)


def record() -> dict[str, Any]:
    return {
        "Muon on dense matrices": {mode: muon(mode) for mode in MODES},
        "cast_model": {name: cast_model(name) for name in casting.MODELS},
        "training of a Llama": {f"{name} {mode}": training(name, mode) for name in ALGORITHMS for mode in MODES},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)  # how a product is cut may depend on how many there are
    Path(sys.argv[1]).write_text(json.dumps({"package": str(Path(hf_lowprec.__file__).parents[1]), **record()}))
