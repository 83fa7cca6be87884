"""The optimizers whose steps are compared on a CPU, and the shapes of what they step."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gradient_kinds import KINDS, RANDOM, give_gradients
from gradient_kinds import shapes as embedding_and_experts
from peers.optimizers import is_installed, optimi_kahan

from hf_lowprec import AdamW
from hf_lowprec.optim import ALGORITHMS, Adafactor
from hf_lowprec.optim.backends.c import native
from hf_lowprec.optim.backends.c.compiler import require_compiler

LR, DECAY = 1e-3, 0.01
Shapes = list[tuple[int, ...]]
MODES = ("kahan", "split", "stochastic")
BASELINE = "torch AdamW, FP32, fused"
IN_8_BITS = ", states in 8 bits"


def smollm2_135m() -> Shapes:
    """Parameters of SmolLM2-135M, a Llama with 30 layers: 272 tensors, tied embeddings."""
    hidden, intermediate, keys, vocabulary = 576, 1536, 192, 49152
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * 30, (hidden,)]


SETS: dict[str, Shapes] = {"64 × (512×1024)": [(512, 1024)] * 64, "SmolLM2-135M": smollm2_135m()}
IN_CACHE, IN_MEMORY = "1 × (512×1024)", "16 × (512×1024)"
CACHE_AND_MEMORY: dict[str, Shapes] = {IN_CACHE: [(512, 1024)], IN_MEMORY: [(512, 1024)] * 16}
"""The first set stays in a cache of 16 MiB, in FP32 too; the second is four times as large as one of 32 MiB."""
STEPS_IN_CACHE = 20
"""Steps of an optimizer in each of its turns, so that its tensors are in the cache, and not those of the others."""
INSTRUCTION_SETS = {
    "": "",
    ", 256-bit vectors": "-mprefer-vector-width=256",
    ", without AVX-512": "-mno-avx512f",
    ", x86-64-v4": "-march=x86-64-v4",
    ", x86-64-v3": "-march=x86-64-v3",
}
"""Further flags for the compiler, which take precedence over those of `compiler.py`, by what rows are called."""


EMBEDDING_AND_EXPERTS: dict[str, Shapes] = {
    "embedding (8192×512), 16 experts (512×512)": embedding_and_experts(8192, 512, 16, 512)
}


def parameters(shapes: Shapes, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Build weights with gradients, both of ordinary magnitude."""
    params = [torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param).mul_(0.01)
    return params


def candidates(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """An optimizer per row of the table, each with parameters of its own."""

    def torch_fused(dtype: torch.dtype) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters(shapes, dtype), lr=LR, weight_decay=DECAY, fused=True)

    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch_fused(torch.float32),
        "torch AdamW, BF16, fused": torch_fused(torch.bfloat16),
    }
    if is_installed("torch-optimi"):
        params = parameters(shapes, torch.bfloat16)
        found["optimi AdamW, BF16, Kahan"] = optimi_kahan(params, lr=LR, weight_decay=DECAY)
    else:
        print("optimi is not installed (pip install torch-optimi): left out")
    for mode in ("kahan", "stochastic", "nearest"):
        found[f"hf_lowprec AdamW, {mode}"] = AdamW(
            parameters(shapes, torch.bfloat16), lr=LR, weight_decay=DECAY, rounding=mode, backend="native"
        )
    return found


def algorithms(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """Every algorithm of ours and the baseline; Muon steps only matrices, and leaves other tensors to AdamW."""
    params = parameters(shapes, torch.float32)
    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    }
    for (name, cls), mode in product(ALGORITHMS.items(), ("kahan", "stochastic")):
        params = parameters(shapes, torch.bfloat16)
        options = {"SGD": {"momentum": 0.9}, "Muon": {"matrices": [p for p in params if p.ndim == 2]}}.get(name, {})
        found[f"hf_lowprec {name}, {mode}"] = cls(params, lr=LR, rounding=mode, backend="native", **options)
    return found


def adafactor(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """The baseline, torch's Adafactor in FP32, our AdamW, and our Adafactor with the settings of its `optim=` names."""
    params = parameters(shapes, torch.float32)
    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True),
        "torch Adafactor, fp32": torch.optim.Adafactor(parameters(shapes, torch.float32), lr=LR),
    }
    for (name, options), mode in product(
        (("AdamW", {}), ("Adafactor", Adafactor.named_defaults)), ("split", "stochastic")
    ):
        params = parameters(shapes, torch.bfloat16)
        optimizer = ALGORITHMS[name](params, lr=LR, rounding=mode, backend="native", **options)
        found[f"hf_lowprec {name}, {mode}"] = optimizer
    return found


def states_in_8_bits(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """The baseline, and optimizers of ours with states in BF16 and in 8 bits."""
    params = parameters(shapes, torch.float32)
    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    }
    modes: list[tuple[str, dict[str, Any]]] = [("AdamW", {"rounding": mode}) for mode in MODES]
    modes += [("Lion", {"rounding": "kahan"}), ("SGD", {"rounding": "kahan", "momentum": 0.9})]
    for (name, options), dtype in product(modes, (torch.bfloat16, torch.int8)):
        params = parameters(shapes, torch.bfloat16)
        row = f"hf_lowprec {name}, {options['rounding']}{IN_8_BITS if dtype == torch.int8 else ''}"
        found[row] = ALGORITHMS[name](params, lr=LR, state_dtype=dtype, backend="native", **options)
    return found


def instruction_sets(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """The baseline, and our modes in code for several instruction sets."""
    params = parameters(shapes, torch.float32)
    found: dict[str, torch.optim.Optimizer] = {
        BASELINE: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    }
    compiler = shlex.join(require_compiler())
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, flags) in enumerate(INSTRUCTION_SETS.items()):
            script = Path(folder, f"compiler-{number}")
            script.write_text(f'#!/bin/sh\nexec {compiler} "$@" {flags}\n')
            script.chmod(0o700)
            with _environment(CC=str(script), HF_LOWPREC_CACHE=f"{folder}/cache"):
                native._load.cache_clear()  # of what was compiled with the flags before
                check_parity([torch.bfloat16])
                for mode in MODES:
                    params = parameters(shapes, torch.bfloat16)
                    optimizer = AdamW(params, lr=LR, weight_decay=DECAY, rounding=mode, backend="native")
                    optimizer.step()  # looks for the compiled code
                    found[f"hf_lowprec AdamW, {mode}{name}"] = optimizer
    return found


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables, and in the end what they were."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def kinds_of_gradients(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    """`candidates` without those that round to nearest, with gradients of each kind."""
    found = {}
    for kind in KINDS:
        for name, optimizer in candidates(shapes).items():
            if not name.endswith(("BF16, fused", "nearest")):
                give_gradients(optimizer.param_groups[0]["params"], kind)
                found[name if kind == RANDOM else f"{name}; {kind}"] = optimizer
    return found


def check_parity(state_dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.int8)) -> None:
    """Exit if the compiled step does not give the bits of the eager one: the speed of a wrong step means nothing."""
    for mode, dtype in product((*MODES, "nearest"), state_dtypes):
        results = []
        for backend in ("eager", "native"):
            torch.manual_seed(0)
            params = parameters([(1000, 33), (100, 64), (7,)], torch.bfloat16)
            optimizer = AdamW(params, lr=LR, weight_decay=DECAY, rounding=mode, state_dtype=dtype, backend=backend)
            for _ in range(3):
                optimizer.step()
            results.append([*params, *(v for s in optimizer.state.values() for v in s.values())])
        if not all(map(torch.equal, *results)):
            raise SystemExit(
                f"native and eager disagree for rounding={mode!r}, state_dtype={dtype}: no speed is reported"
            )
