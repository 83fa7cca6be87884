"""AdamW of this package and of others on the same work: bytes, displacements, bits under sharding, a short training.

Compared are torch's AdamW, optimi, torchao, bitsandbytes, HeavyBall and FlashOptim's published algorithm; packages not
installed are left out. Each part of the comparison is a file of `benchmarks/peers/`, which says how it measures.

    pip install --no-deps torch-optimi torchao bitsandbytes heavyball opt-einsum
    python benchmarks/compare_peers.py [--elements 512] [--seeds 2] [--steps 200] [--threads 1]
    python benchmarks/compare_peers.py --parts bytes,sharding
    python benchmarks/compare_peers.py --parts none    # only print the table of an earlier run

Parts that are not measured keep what the output file holds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from peers import optimizers
from peers.candidates import BASELINE, CANDIDATES, Candidate, installed
from peers.displacement import CASES, by_mean, by_scale
from peers.memory import bytes_per_parameter
from peers.sharding import sharding_verdicts, summary
from peers.short_training import final_losses

from hf_lowprec.tools.demo.pretrained import quiet_libraries

MEAN = 0.3
"""Standard deviation of the elements' means, of the second measurement of `state_rounding.py`."""
SIGMAS = sorted({case.sigma for case in CASES})

Measured = dict[str, Any]
"""Name of a candidate → what was measured with one seed."""


def measure_bytes(candidates: Sequence[Candidate], options: argparse.Namespace, seed: int) -> Measured:
    """Bytes per parameter."""
    return {candidate.name: bytes_per_parameter(candidate) for candidate in candidates}


def measure_sharding(candidates: Sequence[Candidate], options: argparse.Namespace, seed: int) -> Measured:
    """Compare the bits of sharded steps with those of whole tensors."""
    return dict(sharding_verdicts(candidates))


def measure_mean(candidates: Sequence[Candidate], options: argparse.Namespace, seed: int) -> Measured:
    """A displacement under noise around a mean."""
    return dict(by_mean(candidates, MEAN, len(CASES) * options.elements, seed))


def measure_scale(candidates: Sequence[Candidate], options: argparse.Namespace, seed: int) -> Measured:
    """A displacement for each case of scattered scales."""
    return dict(by_scale(candidates, CASES, options.elements, seed))


def measure_training(candidates: Sequence[Candidate], options: argparse.Namespace, seed: int) -> Measured:
    """The loss after fine-tuning."""
    return dict(final_losses(candidates, options.steps, seed))


PARTS: dict[str, Callable[[Sequence[Candidate], argparse.Namespace, int], Measured]] = {
    "bytes": measure_bytes,
    "sharding": measure_sharding,
    "mean": measure_mean,
    "scale": measure_scale,
    "training": measure_training,
}
_WITHOUT_SEED = ("bytes", "sharding")


def markdown(parts: dict[str, dict[str, list[Any]]]) -> str:
    """One row per candidate, in the order of `CANDIDATES`; cells that were not measured are empty.

    Displacements are shown as slope and error.

    Args:
        parts: part → name of a candidate → what was measured, one entry for each seed.
    """
    lines = [
        "| AdamW | bytes per parameter | same bits when sharded | around a mean "
        f"| {' | '.join(f'σ = {sigma:.0f}' for sigma in SIGMAS)} | loss − FP32's |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for candidate in CANDIDATES:
        found = {part: values[candidate.name] for part, values in parts.items() if candidate.name in values}
        if not found:
            continue
        cells = [
            f"{found['bytes'][0]:.2f}" if "bytes" in found else "",
            summary(found["sharding"][0]) if "sharding" in found else "",
        ]
        cells.append(_slope_and_error(*_over_seeds(found["mean"])) if "mean" in found else "")
        cells += _worst(found["scale"]) if "scale" in found else [""] * len(SIGMAS)
        cells.append(_loss(found["training"], parts["training"][BASELINE]) if "training" in found else "")
        lines.append(f"| {' | '.join((candidate.name, *cells))} |")
    return "\n".join(lines)


def _over_seeds(pairs: Iterable[Sequence[float]]) -> tuple[float, float]:
    """The means of slopes and of errors."""
    slopes, errors = zip(*pairs, strict=True)
    return statistics.mean(slopes), statistics.mean(errors)


def _worst(by_seed: Sequence[Sequence[Sequence[float]]]) -> list[str]:
    """For each σ, the slope and the error of the worst case; of slopes and errors, the means over seeds."""
    means = [_over_seeds(pairs) for pairs in zip(*by_seed, strict=True)]
    cells = []
    for sigma in SIGMAS:
        slopes, errors = zip(
            *(pair for pair, case in zip(means, CASES, strict=True) if case.sigma == sigma), strict=True
        )
        cells.append(_slope_and_error(max(slopes, key=abs), max(errors)))
    return cells


def _slope_and_error(slope: float, error: float) -> str:
    if not (math.isfinite(slope) and math.isfinite(error)):
        return "not finite"
    return f"{slope:+,.{_digits(slope)}%}, {error:,.{_digits(error)}%}"


def _digits(value: float) -> int:
    return 1 if abs(value) < 10 else 0


def _loss(losses: Sequence[float], exact: Sequence[float]) -> str:
    """The mean difference from FP32, paired by seed, and each seed's; for FP32 itself, the mean loss."""
    if losses == exact:
        return f"({statistics.mean(losses):.4f})"
    differences = [loss - reference for loss, reference in zip(losses, exact, strict=True)]
    return f"{statistics.mean(differences):+.4f} ({', '.join(f'{value:+.4f}' for value in differences)})"


def _recorded(path: Path, versions: dict[str, str]) -> dict[str, Any]:
    """Read an earlier result; a new, empty one if there is no file.

    Raises:
        SystemExit: it was measured with other versions.
    """
    if not path.exists():
        return {"versions": versions, "options": {}, "parts": {}}
    result = json.loads(path.read_text())
    if result["versions"] != versions:
        raise SystemExit(f"{path} was measured with other versions; choose another --output, or remove it")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the numbers after every seed, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; or none (default: all)")
    parser.add_argument("--only", default="", help="only candidates with this in their name")
    parser.add_argument("--elements", type=int, default=512, help="of each displacement's case; a multiple of 256")
    parser.add_argument("--seeds", type=int, default=2, help="of displacements and training")
    parser.add_argument("--steps", type=int, default=200, help="of the short training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/peers-{date.today()}.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    optimizers.run_uncompiled()
    quiet_libraries()

    chosen = installed(candidate for candidate in CANDIDATES if options.only in candidate.name)
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "hf-lowprec")}
    versions |= optimizers.versions()
    result = _recorded(options.output, versions)
    for part in () if options.parts == "none" else options.parts.split(","):
        measured: dict[str, list[Any]] = {candidate.name: [] for candidate in chosen}
        for seed in range(1 if part in _WITHOUT_SEED else options.seeds):
            for name, value in PARTS[part](chosen, options, seed).items():
                measured[name].append(value)
            result = _recorded(options.output, versions)  # again: another process may have measured another part
            result["parts"].setdefault(part, {}).update(measured)
            result["options"][part] = {key: vars(options)[key] for key in ("elements", "steps", "threads")}
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result) + "\n")
            print(f"{part}, seed {seed}: written to {options.output}", flush=True)
    print(markdown(result["parts"]))


if __name__ == "__main__":
    main()
