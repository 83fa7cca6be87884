"""Does Muon in 16 bits end where it does in FP32? Is it better than AdamW, and are two variants better still?

Hidden matrices are stepped with Muon and all other parameters with AdamW, or all with AdamW, at several rates. The
variants are NorMuon (Li et al., arXiv:2510.05491, Algorithm 1), Muon+ with rows of equal length (arXiv:2602.21545) and
cautious weight decay (Chen et al., arXiv:2510.12402, Algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hf_lowprec
from benchmarks.evidence.harness import Experiment, Workspace
from benchmarks.evidence.page import Row, Section, describe, markdown_table
from benchmarks.evidence.statistics import paired, verdict
from benchmarks.evidence.training import text
from benchmarks.evidence.training.loop import Training
from benchmarks.evidence.training.modes import MODES, Mode
from benchmarks.evidence.training.replicas import Replicas, Shape
from hf_lowprec.optim.algorithms._newton_schulz import newton_schulz

_COEFFICIENTS, _NS_STEPS, _NS_EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
_NORMUON, _MUON_PLUS = 0.95, 0.0
"""NorMuon's β₂, and without a moving average."""
_ROW_EPS = 1e-8


class FP32Muon(torch.optim.AdamW):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` on stacks of matrices, and torch's AdamW on the rest.

    Args:
        model: in FP32.
        matrices: the parameters of it that are stacks of matrices.
        row_decay: β₂ of NorMuon: divide each row of an orthogonalized matrix by the root of a moving average of its
            mean square, and scale the result to the length of an orthogonal matrix. None leaves rows as they are.
        is_cautious: decay only weights that the update makes smaller.
        settings: of AdamW; Muon shares `lr` and `weight_decay`.
    """

    def __init__(
        self,
        model: nn.Module,
        matrices: list[nn.Parameter],
        row_decay: float | None,
        is_cautious: bool,
        **settings: Any,
    ) -> None:
        ids = set(map(id, matrices))
        others = [param for param in model.parameters() if id(param) not in ids]
        super().__init__([{"params": others}, {"params": matrices}], fused=True, **settings)
        self.row_decay, self.is_cautious = row_decay, is_cautious

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[1]
        lr, decay = group["lr"], group["weight_decay"]
        for param in group["params"]:
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
                state["row_squares"] = torch.zeros_like(param[..., :1])
            momentum = state["momentum_buffer"].lerp_(param.grad, 0.05)
            matrix = param.grad.lerp(momentum, 0.95).bfloat16()
            update = newton_schulz(matrix, _COEFFICIENTS, _NS_STEPS, _NS_EPS).float()
            if self.row_decay is not None:
                update = self._with_normal_rows(update, state["row_squares"])
            scale = 0.2 * max(param.shape[-2:]) ** 0.5
            param.mul_(1 - lr * decay * (update * param >= 0) if self.is_cautious else 1 - lr * decay)
            param.add_(update, alpha=-lr * scale)
            param.grad = None
        super().step()

    def _with_normal_rows(self, update: Tensor, squares: Tensor) -> Tensor:
        squares.lerp_(update.square().mean(-1, keepdim=True), 1 - self.row_decay)
        normal = update / (squares.sqrt() + _ROW_EPS)
        return normal * (min(update.shape[-2:]) ** 0.5 / normal.norm(dim=(-2, -1), keepdim=True))


@dataclass(frozen=True)
class _MuonMode(Mode):
    """A way to train with Muon: with this package's if it has a `rounding`, otherwise in FP32.

    Attributes:
        row_decay: see `FP32Muon`.
        is_cautious: see `FP32Muon`.
    """

    row_decay: float | None = None
    is_cautious: bool = False

    def optimizer(self, model: nn.Module, algorithm: str = "Muon", **settings: Any) -> torch.optim.Optimizer:
        matrices = [param for name, param in model.blocks.named_parameters() if "norm" not in name]  # type: ignore[union-attr]
        if self.rounding is None:
            return FP32Muon(model, matrices, self.row_decay, self.is_cautious, **settings)
        hf_lowprec.cast_model(model, keep_low_bits=self.rounding != "stochastic")
        return hf_lowprec.Muon(
            model.parameters(), matrices=matrices, rounding=self.rounding, **settings, **self.options
        )


_FP32, _ADAMW = "muon-fp32", "adamw-fp32"
_OF_ADAMW = (_ADAMW, "adamw-split")
WAYS = {
    _ADAMW: MODES["fp32"],
    "adamw-split": MODES["split"],
    _FP32: _MuonMode("FP32"),
    "muon-split": _MuonMode("split", "split"),
    "muon-stochastic": _MuonMode("stochastic", "stochastic"),
    "muon-nearest": _MuonMode("rounded to nearest", "nearest"),
    "normuon-fp32": _MuonMode("FP32, NorMuon", row_decay=_NORMUON),
    "muonplus-fp32": _MuonMode("FP32, Muon+", row_decay=_MUON_PLUS),
    "muonplus-split": _MuonMode("split, Muon+", "split", options={"normalize_rows": True}),
    "cautious-fp32": _MuonMode("FP32, cautious weight decay", is_cautious=True),
}


@dataclass(frozen=True)
class Settings:
    """Settings of the training runs.

    Attributes:
        rates: highest learning rates.
        seeds: how many.
        steps: the rate rises over a twentieth of them and then falls to zero.
        records: steps after which the validation loss is taken.
        shape: of the model.
        sequences: per step and seed.
    """

    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3, 0.016)
    seeds: int = 10
    steps: int = 2000
    records: tuple[int, ...] = (200, 500, 1000, 1500, 2000)
    shape: Shape = field(default_factory=lambda: Shape(width=64))
    sequences: int = 4


HOUR = Settings(rates=(4e-3,), seeds=5, steps=600, records=(60, 150, 300, 450, 600))
FULL = Settings(steps=50_000, records=(5000, 12_500, 25_000, 50_000), shape=Shape(width=256, layers=6, length=128))


def cases(settings: Settings) -> list[str]:
    """Every way at every rate."""
    return [f"{way} {rate:g}" for rate in settings.rates for way in WAYS]


def run(case: str, settings: Settings, work: Workspace) -> dict[str, Any]:
    """Train in one way at one rate."""
    way, highest = case.split()
    seeds, data = list(range(settings.seeds)), text.load(work.data)
    sequences = text.Sequences(data, seeds, settings.sequences, settings.shape.length)

    def rate(step: int) -> float:
        return float(highest) * min((step + 1) / (settings.steps / 20), 1) * (1 - step / settings.steps)

    options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    training = Training(work, case, WAYS[way], Replicas(seeds, settings.shape), sequences, rate, options)
    training.load(case)
    return {"points": training.run(settings.steps, settings.records), "text": data.checksum}


def section(record: dict[str, Any]) -> Section:
    """Differences from Muon in FP32 at each rate, and from AdamW at the best rate of each."""
    settings = record["settings"]
    losses = {case: np.array(found["points"][-1]["loss"]) for case, found in record["cases"].items()}
    rates = [rate for rate in settings["rates"] if all(f"{way} {rate:g}" in losses for way in WAYS)]
    best = {way: min((losses[f"{way} {rate:g}"] for rate in rates), key=np.mean) for way in WAYS}
    rows, table, curves = [], [], []
    for way, mode in WAYS.items():
        label, exact = (f"Muon, {mode.label}", _FP32) if way not in _OF_ADAMW else (f"AdamW, {mode.label}", _ADAMW)
        if way == exact:
            cells = [f"{losses[f'{way} {rate:g}'].mean():.4f}" for rate in rates]
        else:
            pairs = [paired(losses[f"{way} {rate:g}"], losses[f"{exact} {rate:g}"]) for rate in rates]
            cells = [f"{found} {verdict(found)}" for found in pairs]
            found = paired(best[way], best[exact])
            rows.append(Row(f"{label}: loss minus FP32's, each at its best rate", f"{found}", verdict(found)))
        table.append([label, *cells])
        rate = min(rates, key=lambda rate: losses[f"{way} {rate:g}"].mean())
        points = record["cases"][f"{way} {rate:g}"]["points"]
        curves.append([label, f"{rate:g}", *(f"{np.mean(point['loss']):.4f}" for point in points)])
    gain = paired(best[_FP32], best[_ADAMW])
    rows.insert(0, Row("Muon: loss minus AdamW's, in FP32, each at its best rate", f"{gain}", verdict(gain)))
    heads, steps = ["optimizer", *(f"{rate:g}" for rate in rates)], [f"{step:,}" for step in settings["records"]]
    words = (
        f"{describe(settings)} It takes {settings['steps']:,} steps with β = (0.9, 0.95), momentum 0.95 and weight "
        "decay 0.1. The learning rate rises over a twentieth of the steps and then falls to zero."
    )
    ends = "; ".join(f"{mode} {paired(best[f'muon-{mode}'], best[_FP32])}" for mode in ("split", "stochastic"))
    return Section(
        "Muon",
        words,
        rows,
        [f"Loss in nats/byte by step, each at its best rate:\n\n{markdown_table(['', 'rate', *steps], curves)}"],
        question="Does Muon in 16 bits reach its loss in FP32?",
        answer=(
            f"At the best learning rates, the difference from Muon's loss in FP32 is, in nats/byte: {ends}. In FP32, "
            f"Muon's loss minus AdamW's is {gain}."
        ),
        model=f"{Shape(**settings['shape']).parameters() / 1e6:.2f} million",
        table=(
            "FP32's loss by learning rate, and differences from it with the same algorithm, in nats/byte:\n\n"
            f"{markdown_table(heads, table)}"
        ),
    )


_SIZES = {"hour": HOUR, "night": Settings(), "full": FULL}
EXPERIMENT = Experiment("muon", _SIZES, cases, run, section, reference=lambda case: "*-fp32 *")
