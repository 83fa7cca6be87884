"""Numbers in the pages are those in the files that they were taken from."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.command_output import hf_lowprec
from tests.support.docs.pages import ROOT, blocks, pages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESULTS = ROOT / "benchmarks" / "results"
MODES = ("kahan", "split", "stochastic")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def result(name: str) -> dict[str, Any]:
    """The results of a benchmark, of its latest run."""
    return json.loads(max(RESULTS.glob(f"{name}-20??-??-??.json")).read_text(encoding="utf-8"))


def fine_tuning(way: str, seeds: str = "2026-11-21-seeds-*") -> list[dict[str, Any]]:
    """The fine-tuning runs of a variant in the files of `text_quality.py`, by seed; the first is that of the demo."""
    files = sorted(RESULTS.glob(f"text-quality-{seeds}.json"))
    runs = [run for file in files for run in json.loads(file.read_text(encoding="utf-8"))["runs"]]
    return [run["stages"][1]["runs"][way] for run in sorted(runs, key=lambda run: run["seed"])]


def at_a_glance() -> list[str]:
    """The first page's table: ten seeds of fine-tuning, the step and the training on an H200."""
    on_h200 = gpus()[1]
    steps = {found["optimizer"]: f"{found['device_ms']:.1f} ms" for found in on_h200["step_1b"]["rows"]}
    speeds = {found["way"]: found["tokens_per_second"] for found in on_h200["training"][0]["rows"]}
    latest = "2026-11-23-split-and-8-bits"
    ways = (
        ("FP32 AdamW; on the GPU with `bf16=True`", "16", fine_tuning("fp32"), "torch AdamW, FP32, fused"),
        ("`model.to(torch.bfloat16)`", "8", fine_tuning("nearest"), "torch AdamW, BF16, fused"),
        ("**`adamw_bf16_split`**, recommended", "10", fine_tuning("split", latest), "hf_lowprec AdamW, split"),
        ("`adamw_bf16_sr`", "8", fine_tuning("sr"), "hf_lowprec AdamW, stochastic"),
        (
            *('`adamw_bf16_sr`, `optim_args="state_dtype=int8"`', "6.06", fine_tuning("sr-8bit", latest)),
            "hf_lowprec AdamW, stochastic, 8-bit states",
        ),
    )
    first, found = next(iter(speeds.values())), []
    for label, size, runs, optimizer in ways:
        lost = f"{abs(mean(run['lost_updates'] for run in runs)):.0%}" + "⁴" * ("_sr" in label)
        speed = speeds.get(optimizer.replace("hf_lowprec AdamW,", "BF16, hf_lowprec"), first if size == "16" else None)
        ratio = "" if speed is None else f"{speed / first:.2f} ×"
        found.append(row(label, size, lost, f"{mean(run['final'] for run in runs):.4f}", steps[optimizer], ratio))
    return [text.replace("  ", " ") for text in found]


def lost_updates(digits: int, words: str) -> Callable[[], list[str]]:
    return lambda: [words.format(f"{100 * mean(run['lost_updates'] for run in fine_tuning('nearest')):.{digits}f}%")]


def micro_batches() -> list[str]:
    by_count = result("micro-batches")["results"].values()
    errors = {mode: [100 * of[mode]["relative error"] for of in by_count] for mode in ("nearest", "kahan", "fp32")}
    nearest = ", ".join(f"{error:.2f}%" if error < 1 else f"{error:.1f}%" for error in errors["nearest"])
    too_short = max(100 * of["nearest"]["too short"] for of in by_count)
    kahan, fp32 = (f"{min(errors[name]):.2f}% to {max(errors[name]):.2f}%" for name in ("kahan", "fp32"))
    return [f"| 0 | {nearest} (and {too_short:.1f}% too short)", f"| 2 | {kahan}", f"| `fp32` | 4 | {fp32} |"]


def bytes_of_others() -> dict[str, str]:
    return {name: f"{values[0]:.2f}" for name, values in result("peers")["parts"]["bytes"].items()}


def bytes_when_migrating() -> list[str]:
    found = bytes_of_others()
    torchao, bnb = found["torchao AdamW8bit, weights stochastic"], found["bitsandbytes AdamW8bit, weights nearest"]
    in_fp32, ours = found["bitsandbytes AdamW8bit, FP32 weights"], found["hf_lowprec AdamW, stochastic, 8-bit states"]
    return [
        f"8-bit states | {torchao} and {bnb} with BF16 weights, {in_fp32} (bitsandbytes) with FP32 |",
        f"`AdamW8bit` takes {torchao} bytes with BF16 weights",
        f"does here ({ours})",
        f"That makes {bnb} bytes with BF16 weights and {in_fp32} with FP32 weights",
    ]


def table(script: str, name: str) -> Callable[[], list[str]]:
    """The rows of the table that a benchmark prints of its results."""
    return lambda: module(script).table(result(name)).splitlines()


def diffusers_models() -> list[str]:
    measured = result("diffusers-models")
    off = {model: row["weights_off"] for model, row in measured["models"].items()}
    moved = measured["averages_moved"]
    return [
        *(f"| {model} | {row['autocast']:.3f} | {row['split']:.3f} |" for model, row in off.items()),
        f"{moved['bf16']:.1%} of the averages moved within 50 steps; in FP32, {moved['fp32']:.0%} did.",
    ]


def import_times() -> list[str]:
    taken = result("import-time")["processor seconds"]
    own_loop = median(taken["import hf_lowprec"]) + median(taken["hf_lowprec.AdamW"])
    trainer = median(taken["import hf_lowprec, wrapping Trainer"])
    return [f"A script with its own loop pays {own_loop:.1f} seconds for hf_lowprec, one with Trainer {trainer:.1f}."]


def module(name: str) -> Any:
    """A module of `benchmarks`."""
    return importlib.import_module(name)


def cells(text: str) -> list[list[str]]:
    """The cells of the rows of a Markdown table, without its head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def row(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def losses_on_text() -> list[str]:
    quality, names = module("text_quality"), {"BF16 split": "split", "BF16 Kahan": "kahan", "BF16 stochastic": "sr"}
    at_rate, at_twice = (
        cells(quality.markdown(*quality.joined(sorted(RESULTS.glob(f"text-quality-{files}.json")))))
        for files in ("2026-*", "at-twice-the-rate-2026-*")
    )
    found = []
    for _, label, loss, difference, _, lost in at_rate:
        mode, _, states = label.partition(", ")
        name = f"`adamw_bf16_{names[mode]}`" + (f", {states}" if states else "") if mode in names else label
        found.append(row(name, loss, difference, lost.replace("-0.0", "0.0")) if difference != "0" else row(name, loss))
    half = len(at_twice) // 2
    return [*found, *(row(at_twice[k][3], at_twice[half + k][3]) for k in range(1, half))]


def losses_of_adafactor() -> list[str]:
    quality = module("text_quality")
    recorded = quality.joined(sorted(RESULTS.glob("text-quality-adafactor-*.json")))
    rows = cells(quality.markdown(*recorded, quality.BY_OPTIMIZER["adafactor"]))
    names = {"BF16 split": "`adafactor_bf16_split`", "BF16 stochastic": "`adafactor_bf16_sr`"}
    return [
        row(names[label], loss, difference, lost.replace("-0.0", "0.0")) if label in names else row(label, loss)
        for _, label, loss, difference, _, lost in rows
    ]


def losses_at_a_glance() -> list[str]:
    quality = module("text_quality")
    rows = cells(quality.markdown(*quality.joined(sorted(RESULTS.glob("text-quality-2026-*.json")))))
    shown = ("FP32 AdamW", "BF16 split", "BF16 Kahan", "BF16 stochastic", "BF16 nearest")
    losses = {(stage, label): loss.partition(" ")[0] for stage, label, loss, *_ in rows}
    return [row(*(losses[stage, label] for label in shown)) for stage in ("pretraining", "fine-tuning")]


def losses_of_diffusion() -> list[str]:
    by_seed = {name: found.values() for name, found in result("diffusion-quality")["losses"].items()}
    losses = {name: f"{mean(mean(of['fine-tuning']) for of in seeds):.4f}" for name, seeds in by_seed.items()}
    return [row(losses["fp32"], losses["split"], "", losses["sr"], losses["nearest"]).replace("  ", " ")]


def accuracies_of_encoder() -> list[str]:
    found, over_seeds = [], module("classification").over_seeds
    for file in ("2026-11-22-bf16-states", "2026-11-23-8-bit-states", "adafactor-2026-11-26"):
        for way in json.loads((RESULTS / f"classification-{file}.json").read_text())["accuracy"]:
            forms = {"accuracies": ".2%", "differences": "+.2%", "losses": ".4f", "loss_differences": "+.4f"}
            if way["variant"] != "fp32":
                found.append(row(*(over_seeds(way[key], form) for key, form in forms.items())))
    return found


def displacements_with_split_weights() -> list[str]:
    drift = result("split-weights")["drift"].values()
    return [row(*(f"{mean(run[name][0] for run in runs):.2e}" for runs in drift)) for name in next(iter(drift))[0]]


def compared_packages() -> list[str]:
    rows = cells(module("compare_peers").markdown(result("peers")["parts"]))
    return [row(*values[3:6], values[7].partition(" (")[0]) for values in rows]


def recorded_steps(name: str) -> dict[str, list[list[dict[str, Any]]]]:
    """The rows of each process in a recording of `step_time.py`, by set of shapes."""
    processes = json.loads((RESULTS / f"step-time-cpu-{name}.json").read_text())["processes"]
    return {shapes: [rows[shapes] for rows in processes] for shapes in processes[0]}


def step_times(name: str) -> list[list[str]]:
    """The rows of the tables that `step_time.py` prints of a recording."""
    print_table = module("cpu_step.tables").table
    return [values for item in recorded_steps(name).items() for values in cells(print_table(*item))]


def steps_on_cpu() -> list[str]:
    return [row(*values) for values in step_times("2026-11-21")]


def steps_of_algorithms() -> list[str]:
    ours = [values[1:3] for values in step_times("2026-11-21-algorithms")[1:] if "Muon" not in values[0]]
    return [row(*kahan, *stochastic) for kahan, stochastic in zip(ours[::2], ours[1::2], strict=True)]


def steps_of_adafactor() -> list[str]:
    return [row(*values[1:3]) for values in step_times("2026-11-26-adafactor")]


def steps_with_states_in_8_bits() -> list[str]:
    by_threads = []
    for name in ("2026-11-23-states-in-8-bits", "2026-11-23-states-in-8-bits-2-threads"):
        (processes,) = recorded_steps(name).values()
        by_threads.append(cells(module("cpu_step.tables").table_of_8_bits(processes)))
    return [row(*one[1:], *two[1:]) for one, two in zip(*by_threads, strict=True)]


def steps_of_muon() -> list[str]:
    rows = cells(module("muon_step_time").table(result("muon-step-time")["processes"]))
    return [row(values[0], *(value.partition(" (")[0] for value in values[2:6])) for values in rows]


def steps_of_modes() -> list[str]:
    times = {name: f"{median(found):.2f}" for name, found in result("split-weights")["times"].items()}
    return [row(times[f"{mode}, BF16 states"], times[f"{mode}, FP32 states"]) for mode in MODES]


def steps_on_gpus() -> list[str]:
    """Rows of the step's table; torchao was measured on the H200 alone."""
    tables = [{found["optimizer"]: found for found in gpu["step_1b"]["rows"]} for gpu in gpus()]
    found = []
    for name, on_h200 in tables[1].items():
        if name.endswith(("foreach", "nearest", "32 bits")):
            continue
        rows = [rows.get(name) for rows in tables]
        times = [value for row in rows for value in (("–", "–") if row is None else _time_and_ratio(row))]
        found.append(row(name, f"{on_h200['bytes_per_parameter']:g}", *times))
    return found


def _time_and_ratio(step: dict[str, Any]) -> tuple[str, str]:
    return f"{step['device_ms']:.2f}", f"{step['ratio']:.2f}"


def training_on_gpus() -> list[str]:
    found = []
    for on_h100, on_h200 in zip(*(gpu["training"] for gpu in gpus()), strict=True):
        base = [table["rows"][0] for table in (on_h100, on_h200)]
        for rows in zip(on_h100["rows"], on_h200["rows"], strict=True):
            values = []
            for of_gpu, first in zip(rows, base, strict=True):
                speed = of_gpu["tokens_per_second"]
                values += [f"{speed:.0f}", f"{speed / first['tokens_per_second']:.2f}"]
            size = rows[1]["non_activation_gigabytes"]
            ratio = size / base[1]["non_activation_gigabytes"]
            found.append(row(*values, f"{size:.2f}", f"{ratio + 1e-9:.2f}").removeprefix("|"))
    return found


def gpus() -> list[dict[str, Any]]:
    return [result(f"gpu-step-{name}") for name in ("h100", "h200")]


def fit(page: str, *words: object) -> tuple[dict[str, Any], str]:
    """What `estimate --fit` finds and prints for the configuration in a page's first code block."""
    source = next(block.text for block in blocks(ROOT / page) if "LlamaConfig(" in block.text)
    (name,) = re.findall(r'save_pretrained\("(.*)"\)', source)
    with TemporaryDirectory() as folder:
        exec(source.replace(f'"{name}"', repr(folder)), {})
        command = "estimate", folder, "--fit", *words
        data = json.loads(hf_lowprec(*command, "--json").output)
        return data, " ".join(hf_lowprec(*command).output.replace(folder, name).split())


RELEASED = "state_dtype=int8,gradient_release=True,clip=delayed"


def one_gpu() -> list[str]:
    page, found = "docs/guides/8b-on-one-gpu.md", []
    gib = {memory: fit(page, "--gpu-memory", memory) for memory in (80, 48, 24, 16)}
    best = {80: "split, the [recommended", 48: "stochastic, 8-bit states |"}
    best[24] = "Adafactor, stochastic, gradient release |"
    for memory, words in best.items():
        data, text = gib[memory]
        found += [f"| {memory} GB | {words}", f"| {data['settings'][data['best']]['peak_per_gpu'] / 2**30:.2f} |"]
        assert f"→ {words.partition(',')[0]}" in text
    missing = min(setting["missing"] for setting in gib[16][0]["settings"]) / 2**30
    found.append(f"| 16 GB | none: {missing:.2f} GiB are missing")
    (least,) = (s for s in gib[80][0]["settings"] if (s["optim"], s["optim_args"]) == ("adamw_bf16_sr", RELEASED))
    split, on_host = gib[80][0]["settings"][1], gib[80][0]["settings"][-2]
    assert "offload_gradients" in on_host["optim_args"]
    sizes = (on_host["peak_per_gpu"] / 2**30, on_host["host"] / 2**30)
    found.append("in {:.2f} GiB of the GPU and {:.2f} GiB of host memory".format(*sizes))
    found += [f"takes {split['checkpoint'] / 2**30:.2f} GiB with split weights, {least['checkpoint'] / 2**30:.2f} GiB"]
    found += [f"{gib[80][0]['load_in_fp32'] / 2**30:.2f} GiB for the model in FP32", gib[80][1]]
    _, split, in_8_bits, *_ = fit(page, "--gpu-memory", 80, "--gradient-accumulation-steps", 8)[0]["settings"]
    peaks = (f"{setting['peak_per_gpu'] / 2**30:.2f} GiB" for setting in (split, in_8_bits))
    return [*found, f"the peak is {', and '.join(peaks)} with 8-bit states"]


def many_gpus() -> list[str]:
    page = "docs/guides/64-gpus.md"
    options = "--gpus", 64, "--gpu-memory", 80
    large, _ = fit(page, *options, "--batch-size", 4)
    sums = ("--gradient-accumulation-steps", 4)
    shards, (whole, _) = fit(page, *options, *sums)[0], fit(page, "--gpus", 64, "--gpu-memory", 1000, *sums)
    of_split = {"4 sequences per GPU": large, "`sync_each_batch`": shards, "whole gradients": whole}
    peaks = {words: data["settings"][1]["peak_per_gpu"] / 2**30 for words, data in of_split.items()}
    found = [f"{words} | {peak:.2f} |" for words, peak in peaks.items()]
    found += [f"every GPU, {peaks['whole gradients'] - peaks['`sync_each_batch`']:.2f} GiB"]
    sizes = (f"{size / 2**30:.2f} GiB" for size in (large["settings"][1]["checkpoint"], large["load_in_fp32"]))
    return [*found, "takes {}, and loading in FP32 {}".format(*sizes)]


def requirements() -> list[str]:
    needs = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["trainer"]
    least = {re.split(r"\W", need)[0]: need.partition(">=")[2] for need in needs}
    python = PROJECT["requires-python"].removeprefix(">=")
    versions = (f"{name} {least[name]}" for name in ("torch", "transformers", "accelerate"))
    return [f"needs Python {python}, {next(versions)}, {' and '.join(versions)}, or newer"]


TEXTS: list[tuple[str, Callable[[], list[str]]]] = [
    ("README.md", requirements),
    ("README.md", at_a_glance),
    ("docs/index.md", at_a_glance),
    ("docs/quickstart.md", requirements),
    ("docs/performance/accuracy.md", lost_updates(1, "| {} |")),
    ("docs/guides/migrating.md", lost_updates(0, "lost {} of the weight changes")),
    ("docs/guides/migrating.md", bytes_when_migrating),
    (
        "docs/performance/other-packages.md",
        lambda: [f"| {name} | {size} |" for name, size in bytes_of_others().items()],
    ),
    ("docs/performance/other-packages.md", compared_packages),
    ("docs/performance/index.md", losses_at_a_glance),
    ("docs/performance/index.md", losses_of_diffusion),
    ("docs/performance/accuracy.md", losses_on_text),
    ("docs/performance/accuracy.md", losses_of_adafactor),
    ("docs/performance/accuracy.md", accuracies_of_encoder),
    ("docs/performance/accuracy.md", displacements_with_split_weights),
    ("docs/performance/cpu-step.md", steps_on_cpu),
    ("docs/performance/cpu-step.md", steps_of_algorithms),
    ("docs/performance/cpu-step.md", steps_of_adafactor),
    ("docs/performance/cpu-step.md", steps_with_states_in_8_bits),
    ("docs/performance/cpu-step.md", steps_of_muon),
    ("docs/performance/cpu-step.md", steps_of_modes),
    ("docs/performance/gpu-step.md", steps_on_gpus),
    ("docs/performance/gpu-step.md", training_on_gpus),
    ("docs/guides/distributed.md", micro_batches),
    ("docs/performance/training.md", table("gradient_release", "gradient-release")),
    ("docs/performance/training.md", table("checkpoint_checksums", "checkpoint-checksums")),
    ("docs/performance/training.md", table("import_time", "import-time")),
    ("docs/performance/training.md", import_times),
    ("docs/guides/diffusion.md", diffusers_models),
    ("docs/guides/diffusion.md", table("diffusion_quality", "diffusion-quality")),
]
"""Pages, and what must be in them."""


ESTIMATES = [("docs/guides/8b-on-one-gpu.md", one_gpu), ("docs/guides/64-gpus.md", many_gpus)]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(("page", "texts"), ESTIMATES, ids=[page for page, _ in ESTIMATES])
def test_a_page_says_what_is_estimated(page: str, texts: Callable[[], list[str]]) -> None:
    content = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert [text for text in texts() if text not in content] == []


@pytest.mark.parametrize(("page", "texts"), TEXTS, ids=[page for page, _ in TEXTS])
def test_a_page_says_what_was_measured(page: str, texts: Callable[[], list[str]], monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    content = " ".join((ROOT / page).read_text(encoding="utf-8").replace("−", "-").split())
    assert [text for text in texts() if text not in content] == []


def test_extras_that_are_named_exist() -> None:
    sources = [*pages(), *(ROOT / "hf_lowprec").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"pip install[^\n]*'\.\[(\w+)\]", path.read_text("utf-8"))}
    assert len(named) > 3
    assert named <= {*PROJECT["optional-dependencies"]}
