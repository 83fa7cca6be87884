"""Fine-tune a pretrained encoder: how far from FP32 does each variant of training end, and do norms move?

A small ModernBERT is pre-trained in FP32 on the standard library and its documentation (masked tokens; some minutes,
kept in --work). It is then fine-tuned at 2e-5 to tell from which of six packages a passage is, with separate files
for validation, over several seeds. A seed sets the new head's weights and the data order; within a seed all variants
share both, so differences from FP32 are paired.

The second part fine-tunes for 200 steps and counts the weights of norms that are stored with the same bits at the end
as at the start: LayerNorms of the encoder, RMSNorms of a small Llama, after pre-training and from random weights, where
norms are 1.

    python benchmarks/classification.py
    python benchmarks/classification.py --ways fp32,split,split-8bit,sr-8bit --norm-steps 0
    python benchmarks/classification.py --model google-bert/bert-base-uncased --task mrpc --length 128 --norm-steps 0
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev

import torch
from all_variants import BY_OPTIMIZER
from encoder.fine_tuning import Outcome, fine_tune
from encoder.norms import Moving, norm_runs
from encoder.pretraining import Pretraining, pretrained
from encoder.text import Task, glue, packages
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_lowprec.tools.demo.pretrained import quiet_libraries
from hf_lowprec.tools.demo.report import json_text, variant_descriptions
from hf_lowprec.tools.demo.training import Settings
from hf_lowprec.tools.demo.variants import VARIANTS, Variant

RESULTS = Path(__file__).parent / "results"
WORK = Path(__file__).parent / ".cache" / "classification"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Accuracy:
    """Final validation accuracies of one variant, over seeds.

    Attributes:
        variant: its name.
        accuracies: shares, one for each seed.
        differences: from FP32 of the same seed.
        losses: validation losses.
        loss_differences: from FP32 of the same seed.
        fp32_noise: standard deviation of FP32's accuracies over seeds; NaN for one seed.
        fp32_loss_noise: of its losses.
    """

    variant: str
    accuracies: list[float]
    differences: list[float]
    losses: list[float]
    loss_differences: list[float]
    fp32_noise: float
    fp32_loss_noise: float


def deviation(values: Sequence[float]) -> float:
    """Standard deviation; NaN for one value."""
    return stdev(values) if len(values) > 1 else math.nan


def over_seeds(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation; for one seed the value alone."""
    spread = f" ± {deviation(values):{form.removeprefix('+')}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{spread}"


def accuracies(by_seed: Sequence[dict[str, Outcome]]) -> list[Accuracy]:
    """Summarize every variant from the outcomes of every seed; FP32 is among them."""
    exact = [runs["fp32"].accuracy[-1] for runs in by_seed]
    exact_losses = [runs["fp32"].validation_loss[-1] for runs in by_seed]
    found = []
    for variant in by_seed[0]:
        shares = [runs[variant].accuracy[-1] for runs in by_seed]
        losses = [runs[variant].validation_loss[-1] for runs in by_seed]
        found.append(
            Accuracy(
                variant,
                shares,
                [share - reference for share, reference in zip(shares, exact, strict=True)],
                losses,
                [loss - reference for loss, reference in zip(losses, exact_losses, strict=True)],
                deviation(exact),
                deviation(exact_losses),
            )
        )
    return found


def largest_difference(run: Outcome, reference: Outcome) -> float:
    """The largest difference between the logged training losses of two runs, step by step."""
    pairs = zip(run.training, reference.training, strict=True)
    return max(abs(loss - other) for (_, loss), (_, other) in pairs)


def accuracy_table(found: Sequence[Accuracy], by_seed: Sequence[dict[str, Outcome]], optimizer: str = "adamw") -> str:
    """Format the accuracies as Markdown."""
    lines = [
        "| way | validation accuracy | difference from FP32 | validation loss | difference from FP32 "
        "| training loss, largest difference |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        apart = max(largest_difference(runs[row.variant], runs["fp32"]) for runs in by_seed)
        same = row.variant == "fp32"
        cells = (
            BY_OPTIMIZER[optimizer][row.variant].label,
            over_seeds(row.accuracies, ".2%"),
            "" if same else over_seeds(row.differences, "+.2%"),
            over_seeds(row.losses, ".4f"),
            "" if same else over_seeds(row.loss_differences, "+.4f"),
            "" if same else f"{apart:.4f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def norm_table(runs: dict[str, dict[str, Outcome]]) -> str:
    """Format the shares of norms that never moved as Markdown, with the norms' magnitudes at the start below."""
    variants = list(next(iter(runs.values())))
    lines = [f"| never moved | {' | '.join(runs)} |", f"| --- |{' ---: |' * len(runs)}"]
    for variant in variants:
        shares = [f"{found[variant].norms.never_moved:.1%}" for found in runs.values()]
        lines.append(f"| {variant} | {' | '.join(shares)} |")
    for name, found in runs.items():
        norms = found[variants[0]].norms
        low, middle, high = norms.magnitudes
        lines.append(
            f"\n{name}: {norms.elements} weights of norms, {norms.ones:.1%} exactly 1 at the start, magnitudes "
            f"{low:.4g} to {high:.4g}, median {middle:.4g}. {variants[0]} moved them by {norms.displacement:.2g} "
            f"(median); {norms.same_in_bfloat16:.1%} round to the same BF16 number as before."
        )
    return "\n".join(lines)


def classify(
    variants: Sequence[Variant], model: str, task: Task, settings: Settings, seeds: Sequence[int], work: Path, say: Say
) -> list[dict[str, Outcome]]:
    """Run the first part.

    Returns:
        For each seed the outcome of each variant, by name.
    """
    by_seed = []
    for seed in seeds:
        runs = {}
        for variant in variants:
            torch.manual_seed(seed)  # of the head
            encoder = AutoModelForSequenceClassification.from_pretrained(
                model, num_labels=task.classes, dtype=torch.float32
            )
            with_seed = replace(settings, seed=seed)
            run = fine_tune(variant, encoder, task.train, task.validation, with_seed, work / "trainer")
            runs[variant.name] = run
            start, end = run.accuracy
            seconds = f"{run.seconds:.0f} s of training"
            say(f"seed {seed}, {variant.label}: accuracy {start:.4f} → {end:.4f}, {seconds}")
        by_seed.append(runs)
    return by_seed


def majority(task: Task) -> float:
    """Share of the most frequent class in the validation set."""
    labels = list(task.validation["labels"])
    return max(map(labels.count, set(labels))) / len(labels)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run, print the tables, write the numbers; returns the path of the file written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas (default 0,1,2)")
    parser.add_argument("--optimizer", choices=BY_OPTIMIZER, default="adamw")
    names = "; ".join(f"{optimizer}: {', '.join(known)}" for optimizer, known in BY_OPTIMIZER.items())
    parser.add_argument("--ways", default=",".join(VARIANTS), help=f"fp32 and others ({names})")
    parser.add_argument("--steps", type=int, default=1000, help="of fine-tuning, per run (default 1000)")
    parser.add_argument("--batch-size", type=int, default=8, help="passages per step (default 8)")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="peak of fine-tuning (default 2e-5)")
    parser.add_argument("--passages", type=int, default=1000, help="per class at most (default 1000)")
    parser.add_argument("--length", type=int, default=64, help="tokens per passage (default 64)")
    parser.add_argument("--norm-steps", type=int, default=200, help="of the second part; 0: without (default 200)")
    parser.add_argument("--pretraining-steps", type=int, default=Pretraining.steps, help="of the small ModernBERT")
    parser.add_argument("--llama-steps", type=int, default=500, help="of the small Llama's pre-training (default 500)")
    parser.add_argument("--hidden", type=int, default=Pretraining.hidden, help="width of the small ModernBERT")
    parser.add_argument("--text", default="", help="a file with more text to pre-train on")
    parser.add_argument("--model", help="an encoder to fine-tune instead: a folder, or a name on the hub")
    parser.add_argument("--task", help="a classification of GLUE instead, from the hub: sst2, mrpc, rte, ...")
    parser.add_argument("--work", type=Path, default=WORK, help="where the pretrained encoder is kept")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    quiet_libraries()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - started:6.0f} s] {line}", file=sys.stderr, flush=True)

    model, made = options.model, None
    if model is None:
        model = str(options.work / "encoder")
        recipe = Pretraining(
            steps=options.pretraining_steps, hidden=options.hidden, length=options.length, text=options.text
        )
        made = pretrained(recipe, Path(model))
        say(f"encoder in {model}, pre-training loss {made['losses'][0][1]:.3f} → {made['losses'][-1][1]:.3f}")
    warmup = max(1, options.steps // 10)
    settings = Settings(options.steps, options.batch_size, options.learning_rate, "linear", warmup, 0)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    variants = [BY_OPTIMIZER[options.optimizer][name] for name in options.ways.split(",")]
    tokenizer = AutoTokenizer.from_pretrained(model)
    task = (
        glue(options.task, tokenizer, options.length)
        if options.task
        else packages(tokenizer, options.length, options.passages)
    )
    by_seed = classify(variants, model, task, settings, seeds, options.work, say)
    found = accuracies(by_seed)
    starts = [runs["fp32"].accuracy[0] for runs in by_seed]
    print(accuracy_table(found, by_seed, options.optimizer))
    print(f"\nMost frequent class: {majority(task):.2%} of the validation set; before training: {mean(starts):.2%}.")

    norms = dict[str, dict[str, Outcome]]()
    if options.norm_steps:
        rate, work = options.learning_rate, options.work
        norms = norm_runs(Moving(model, options.length, options.llama_steps, options.norm_steps, rate, work), say)
        print(f"\n{norm_table(norms)}")

    installed = ("hf-lowprec", "torch", "transformers", "datasets", "tokenizers")
    what = "" if options.optimizer == "adamw" else f"{options.optimizer}-"
    path = options.output_dir / f"classification-{what}{datetime.date.today().isoformat()}.json"
    numbers = {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in installed}},
        "device": f"cpu, {torch.get_num_threads()} threads",
        "seconds": time.perf_counter() - started,
        "model": options.model or "small ModernBERT",
        "pretraining": made,
        "data": {
            "task": task.name,
            "train": len(task.train),
            "validation": len(task.validation),
            "length": options.length,
            "majority": majority(task),
        },
        "settings": asdict(settings),
        "optimizer": options.optimizer,
        "seeds": seeds,
        "ways": variant_descriptions(variants),
        "accuracy": [asdict(row) for row in found],
        "largest_difference_of_training_loss": {
            variant.name: [largest_difference(runs[variant.name], runs["fp32"]) for runs in by_seed]
            for variant in variants
        },
        "runs": [
            {"seed": seed, **{variant: asdict(run) for variant, run in runs.items()}}
            for seed, runs in zip(seeds, by_seed, strict=True)
        ],
        "norms": {
            "steps": options.norm_steps,
            "llama_pretraining_steps": options.llama_steps,
            "models": {name: {variant: asdict(run) for variant, run in runs.items()} for name, runs in norms.items()},
        },
    }
    path.write_text(json_text(numbers), encoding="utf-8")
    say(f"written: {path}")
    return path


if __name__ == "__main__":
    main()
