"""Measure how far from FP32 each variant of training ends, compared with the noise of the seed.

Both stages of `hf-lowprec demo` (pre-training a small byte-level Llama, fine-tuning its FP32 result) over several
seeds. A seed sets the initial weights and the data order; within a seed all variants share both, so differences from
FP32 are paired. Text and validation blocks are the same for all seeds.

Two runs of pre-training that begin with slightly different weights end apart, whatever their precision. That distance
is measured too: FP32 again, from first weights that each differ by a thousandth.

    python benchmarks/text_quality.py --steps 1000 --seeds 0,1,2 [--paths 2]
    python benchmarks/text_quality.py --steps 1000 --seeds 0,1,2 --ways fp32,kahan --paths 0
    python benchmarks/text_quality.py --steps 1000 --seeds 0,1,2 --ways fp32,split-8bit,sr-8bit --rate-factor 2
    python benchmarks/text_quality.py --steps 1000 --seeds 0,1,2 --optimizer adafactor --ways fp32,split,sr --paths 0
    python benchmarks/text_quality.py --join benchmarks/results/text-quality-2026-*.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from all_variants import BY_OPTIMIZER
from torch import nn

from hf_lowprec.tools.demo.pretrained import quiet_libraries
from hf_lowprec.tools.demo.report import json_text, numbers, variant_descriptions
from hf_lowprec.tools.demo.stages import Progress, Stage, pretrain_and_fine_tune, pretraining_blocks, small_llama
from hf_lowprec.tools.demo.training import train_variant
from hf_lowprec.tools.demo.variants import VARIANTS, Variant

RESULTS = Path(__file__).parent / "results"

PERTURBATION = 1e-3
"""Relative change of the first weights that tells one path of training from another."""

Numbers = dict[str, Any]
"""The record of a stage, or of a run with one seed; see `numbers`."""


@dataclass(frozen=True)
class Quality:
    """Final validation losses of one variant in one stage, over seeds.

    Attributes:
        stage: the stage's name.
        variant: the variant's name.
        losses: in nats per token, one for each seed.
        differences: from FP32 of the same seed.
        fp32_noise: standard deviation of FP32's losses over seeds; NaN for one seed.
    """

    stage: str
    variant: str
    losses: list[float]
    differences: list[float]
    fp32_noise: float

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return mean(self.losses)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; NaN for one seed."""
        return _deviation(self.losses)

    @property
    def difference(self) -> float:
        """Mean paired difference from FP32."""
        return mean(self.differences)

    @property
    def difference_spread(self) -> float:
        """Standard deviation of the paired differences; NaN for one seed."""
        return _deviation(self.differences)

    @property
    def in_noise(self) -> float:
        """Mean paired difference in units of FP32's noise over seeds."""
        return self.difference / self.fp32_noise if self.fp32_noise else math.nan


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan


def qualities(by_seed: Sequence[Sequence[Numbers]]) -> list[Quality]:
    """Summarize every stage and variant from the recorded stages of every seed."""
    found = []
    for stages in zip(*by_seed, strict=True):
        exact = [stage["runs"]["fp32"]["final"] for stage in stages]
        for variant in stages[0]["runs"]:
            losses = [stage["runs"][variant]["final"] for stage in stages]
            differences = [loss - reference for loss, reference in zip(losses, exact, strict=True)]
            found.append(Quality(stages[0]["name"], variant, losses, differences, _deviation(exact)))
    return found


def other_paths(stage: Stage, seed: int, paths: int, output_dir: Path) -> list[float]:
    """FP32's final losses in pre-training, `stage`, from first weights that differ by a thousandth."""

    def build(path: int) -> nn.Module:
        model, generator = small_llama(seed), torch.Generator().manual_seed(path)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + PERTURBATION * torch.randn(param.shape, generator=generator))
        return model

    blocks = pretraining_blocks(stage.settings.steps)
    fp32, settings = VARIANTS["fp32"], stage.settings
    return [train_variant(fp32, build(path), blocks, settings, output_dir).final for path in range(paths)]


def markdown(
    recorded: Sequence[Numbers], apart: Sequence[float], variants: Mapping[str, Variant] = BY_OPTIMIZER["adamw"]
) -> str:
    """A table, with the mean start of a stage's FP32 runs for scale, and how far FP32's other paths ended.

    Args:
        recorded: the numbers of every seed.
        apart: by how much FP32's other paths ended from it.
        variants: by name.
    """
    by_seed = [numbers["stages"] for numbers in recorded]
    lines = [
        "| stage | way | validation loss | difference from FP32 | in units of FP32's seed noise | updates lost |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for quality in qualities(by_seed):
        runs = [
            stage["runs"][quality.variant] for stages in by_seed for stage in stages if stage["name"] == quality.stage
        ]
        difference = f"{quality.difference:+.5f} ± {quality.difference_spread:.5f}"
        cells = (
            quality.stage,
            variants[quality.variant].label,
            f"{quality.loss:.4f} ± {quality.spread:.4f}",
            *(("0", "0") if quality.variant == "fp32" else (difference, f"{quality.in_noise:+.2f}")),
            f"{100 * mean(run['lost_updates'] for run in runs):.1f}%",
        )
        lines.append(f"| {' | '.join(cells)} |")
    for stages in zip(*by_seed, strict=True):
        starts = [stage["runs"]["fp32"]["start"] for stage in stages]
        lines.append(f"\nBefore {stages[0]['name']} the FP32 model's validation loss is {mean(starts):.4f}.")
    if apart:
        lines.append(
            f"\nFP32's pre-training from weights that differ by {PERTURBATION:.1%} ends {mean(apart):+.5f} ± "
            f"{_deviation(apart):.5f} from itself ({len(apart)} runs)."
        )
    count = len(by_seed)
    lines.append(f"\nNats per token; mean ± standard deviation over {count} seeds; differences are paired by seed.")
    return "\n".join(lines)


def joined(paths: Sequence[Path]) -> tuple[list[Numbers], list[float]]:
    """The numbers of every seed, and how far FP32's other paths ended, of recordings of equal training.

    If recordings have a seed in common, the variants of the later one take the place of those of the earlier one.

    Raises:
        SystemExit: the recordings differ in steps, learning rates, the optimizer, or FP32's losses for the same seed.
    """

    def without_null(found: Numbers) -> Numbers:  # which stands for NaN, see `json_text`
        return {key: math.nan if value is None else value for key, value in found.items()}

    files = [json.loads(path.read_text(encoding="utf-8"), object_hook=without_null) for path in paths]
    if len({(file["steps"], file.get("rate_factor", 1.0), file.get("optimizer", "adamw")) for file in files}) > 1:
        raise SystemExit("--join takes recordings of as many steps, the same learning rates and the same optimizer")
    by_seed: dict[int, Numbers] = {}
    for seed, run in ((seed, run) for file in files for seed, run in zip(file["seeds"], file["runs"], strict=True)):
        earlier = by_seed.setdefault(seed, run)
        for known, stage in zip(earlier["stages"], run["stages"], strict=True):
            if known["runs"]["fp32"]["final"] != stage["runs"]["fp32"]["final"]:
                raise SystemExit(f"--join: FP32's losses for seed {seed} differ, so their variants cannot be compared")
            known["runs"] |= stage["runs"]
    return list(by_seed.values()), [path for file in files for path in file["other_paths"]]


def main(arguments: Sequence[str] | None = None) -> Path | None:
    """Run, print the table, write the numbers; returns the path of the file written.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps per run (default 1000)")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas (default 0,1,2)")
    parser.add_argument("--optimizer", choices=BY_OPTIMIZER, default="adamw")
    names = "; ".join(f"{optimizer}: {', '.join(known)}" for optimizer, known in BY_OPTIMIZER.items())
    parser.add_argument("--ways", default=",".join(VARIANTS), help=f"fp32 and others ({names})")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="multiplies all learning rates (default 1)")
    parser.add_argument("--paths", type=int, default=2, help="further FP32 pre-trainings per seed (default 2)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="FILE", help="only print one table of these recordings, oldest first"
    )
    options = parser.parse_args(arguments)
    if options.join:
        first = json.loads(options.join[0].read_text(encoding="utf-8"))
        print(markdown(*joined(options.join), BY_OPTIMIZER[first.get("optimizer", "adamw")]))
        return None
    seeds = [int(seed) for seed in options.seeds.split(",")]
    known = BY_OPTIMIZER[options.optimizer]
    variants = [known[name] for name in options.ways.split(",")]
    if options.threads:
        torch.set_num_threads(options.threads)
    quiet_libraries()
    options.output_dir.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()

    def result(seed: int) -> Progress:
        return Progress(
            on_result=lambda stage, variant, run: print(
                f"[{time.perf_counter() - started:6.0f} s] seed {seed}, {stage}, {variant.label}: {run.final:.4f}",
                file=sys.stderr,
                flush=True,
            )
        )

    measured, apart = list[Numbers](), list[float]()
    for seed in seeds:
        begun = time.perf_counter()
        stages = pretrain_and_fine_tune(
            variants, options.steps, seed, options.output_dir, result(seed), options.rate_factor
        )
        others = other_paths(stages[0], seed, options.paths, options.output_dir)
        apart += [loss - stages[0].runs["fp32"].final for loss in others]
        recorded = numbers(stages, seed, "byte-level Llama, random weights", time.perf_counter() - begun)
        measured.append(recorded | {"ways": variant_descriptions(variants)})
    print(markdown(measured, apart, known))

    what = "" if options.optimizer == "adamw" else f"{options.optimizer}-"
    path = options.output_dir / f"text-quality-{what}{datetime.date.today().isoformat()}.json"
    summary = [
        {
            "stage": quality.stage,
            "way": quality.variant,
            "losses": quality.losses,
            "mean": quality.loss,
            "standard_deviation": quality.spread,
            "difference_from_fp32": quality.difference,
            "difference_standard_deviation": quality.difference_spread,
            "difference_in_fp32_seed_noise": quality.in_noise,
        }
        for quality in qualities([run["stages"] for run in measured])
    ]
    text = json_text(
        {
            "steps": options.steps,
            "optimizer": options.optimizer,
            "rate_factor": options.rate_factor,
            "seeds": seeds,
            "summary": summary,
            "other_paths": apart,
            "runs": measured,
        }
    )
    path.write_text(text, encoding="utf-8")
    print(f"\nwritten: {path}", file=sys.stderr)
    return path


if __name__ == "__main__":
    main()
