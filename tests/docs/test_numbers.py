"""Numbers in the pages are those in the files that they were taken from."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from benchmarks import muon_shares
from benchmarks.evidence.statistics import paired, verdict
from benchmarks.step_time import table, table_of_8_bits
from tests.support.command_output import hf_lowprec
from tests.support.docs.pages import ROOT, blocks, pages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESULTS = ROOT / "benchmarks" / "results"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def result(name: str) -> dict[str, Any]:
    """The results of a benchmark, of its latest run."""
    return json.loads(max(RESULTS.glob(f"{name}-20??-??-??.json")).read_text(encoding="utf-8"))


def fine_tuning(way: str, rate: str = "2e-05") -> list[dict[str, float]]:
    """Of SmolLM2: losses and lost updates, by seed."""
    record = json.loads((RESULTS / "evidence" / "pretrained-night.json").read_text(encoding="utf-8"))
    return [record["cases"][f"{way} {rate} {seed}"] for seed in range(record["settings"]["seeds"])]


def at_a_glance() -> list[str]:
    """The first page's tables: fine-tuning of SmolLM2; the step and the training on an H200."""
    ways = (
        ("torch AdamW on FP32 weights, with or without `bf16=True`", "16", "fp32"),
        ("torch AdamW after `model.to(torch.bfloat16)`", "8", "nearest"),
        ("**`adamw_bf16_split`**", "10", "split"),
        ("`adamw_bf16_sr`", "8", "sr"),
        ("`adamw_bf16_sr`, `state_dtype=int8`", "6.06", "sr-8bit"),
        ("`adamw_bf16_sr`, `factored=True`, `state_dtype=int8`", "5.03", "sr-factored-8bit"),
    )
    found = []
    for label, size, way in ways:
        runs = fine_tuning(way)
        shares = [run["lost"] for run in runs]
        chance = 2 * stdev(shares) / len(shares) ** 0.5  # stochastic rounding loses nothing on average
        lost = f"{max(abs(mean(shares)) - chance, 0):.0%}"
        found.append(row(label, f"{mean(run['loss'] for run in runs):.4f}", lost, size))
    autocast, fp32 = (mean(run["loss"] for run in fine_tuning(way)) for way in ("autocast", "fp32"))
    assert abs(autocast - fp32) < 0.002
    losses = {way: np.array([run["loss"] for run in fine_tuning(way)]) for _, _, way in ways}
    words = {way: verdict(paired(losses[way], losses["fp32"]), 0.002).partition(",")[0] for way in losses}
    equal = "split weights and `sr` with BF16 states equal FP32; the last two rows are undecided"
    assert [words[way] for _, _, way in ways[2:]] == ["equal", "equal", "undecided", "undecided"], equal
    return [*found, equal, *_speed_at_a_glance()]


def _speed_at_a_glance() -> list[str]:
    on_h200 = gpus()[1]
    steps = {found["optimizer"]: f"{found['device_ms']:.1f}" for found in on_h200["step_1b"]["rows"]}
    training = {found["way"]: found for found in on_h200["training"][0]["rows"]}
    autocast = next(iter(training.values()))
    ways = (
        ("torch AdamW, fused, with autocast", "torch AdamW, FP32, fused"),
        ("torch AdamW, fused, after `model.to(torch.bfloat16)`", "torch AdamW, BF16, fused"),
        ("**`adamw_bf16_split`**", "hf_lowprec AdamW, split"),
        ("`adamw_bf16_sr`", "hf_lowprec AdamW, stochastic"),
        ("`adamw_bf16_sr`, `state_dtype=int8`", "hf_lowprec AdamW, stochastic, 8-bit states"),
    )
    found = []
    for label, optimizer in ways:
        run = training.get(optimizer.replace("hf_lowprec AdamW,", "BF16, hf_lowprec"))
        run = autocast if "FP32" in optimizer else run
        speed = "–" if run is None else f"{run['tokens_per_second'] / autocast['tokens_per_second']:.2f}"
        peak = "–" if run is None else f"{run['peak_gigabytes']:.1f}"
        found.append(row(label, peak, speed, steps[optimizer]))
    return found


def losses_at_a_glance() -> list[str]:
    exact, split, stochastic, nearest = (
        f"{mean(run['loss'] for run in fine_tuning(way)):.4f}" for way in ("fp32", "split", "sr", "nearest")
    )
    before = fine_tuning("fp32")[0]["before"]
    shares = [(before - float(loss)) / (before - float(exact)) for loss in (stochastic, nearest)]
    text = "stochastic rounding makes {:.0%} of FP32's progress, and rounding to nearest {:.0%}".format(*shares)
    rows = {"FP32 AdamW": exact, "`adamw_bf16_split`": split, "`adamw_bf16_sr`": stochastic}
    rows["BF16, rounded to nearest"] = nearest
    return [*(f"| {label} | {loss} |" for label, loss in rows.items()), text]


def losses_of_saved_folders() -> list[str]:
    found = []
    for rate in ("5e-06", "2e-05"):
        split, autocast = fine_tuning("split", rate), fine_tuning("autocast", rate)
        columns = [(split, "loss"), (split, "loss_saved_in_bf16"), (split, "loss_in_bf16"), (autocast, "loss_in_bf16")]
        losses = (f"{mean(run[name] for run in runs):.4f}" for runs, name in columns)
        found.append(row(rate.replace("-0", "-"), *losses))
    return [*found, f"Before fine-tuning, the loss was {fine_tuning('fp32')[0]['before']:.4f}"]


def lost_when_migrating() -> list[str]:
    return [f"lost {mean(run['lost'] for run in fine_tuning('nearest')):.0%} of the weight changes"]


def diffusers_models() -> list[str]:
    measured = result("diffusers-models")
    off = {model: row["weights_off"] for model, row in measured["models"].items()}
    moved = measured["averages_moved"]
    return [
        *(f"| {model} | {row['autocast']:.3f} | {row['split']:.3f} |" for model, row in off.items()),
        f"{moved['bf16']:.1%} of the averages moved within 50 steps; in FP32, {moved['fp32']:.0%} did.",
    ]


def cells(text: str) -> list[list[str]]:
    """The cells of the rows of a Markdown table, without its head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def row(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def recorded_steps(name: str) -> dict[str, list[list[dict[str, Any]]]]:
    """The rows of each process in a recording of `step_time.py`, by set of shapes."""
    processes = json.loads((RESULTS / f"step-time-cpu-{name}.json").read_text())["processes"]
    return {shapes: [rows[shapes] for rows in processes] for shapes in processes[0]}


def step_times(name: str) -> list[list[str]]:
    """The rows of the tables that `step_time.py` prints of a recording."""
    return [values for item in recorded_steps(name).items() for values in cells(table(*item))]


def steps_on_cpu() -> list[str]:
    return [row(*values) for values in step_times("2026-11-28")]


def time_of_error_feedback() -> list[str]:
    """Of each set of shapes the median over processes, and the range over all."""
    ratios = []
    for processes in recorded_steps("2026-11-28").values():
        times = [{row["optimizer"].rpartition(", ")[2]: row["median_ms"] for row in rows} for rows in processes]
        ratios.append([each["stochastic"] / each["stochastic without feedback"] for each in times])
    middle = " and ".join(f"{median(each):.2f}" for each in ratios)
    every = [ratio for each in ratios for ratio in each]
    return [f"{middle} times as long ({min(every):.2f} to {max(every):.2f})"]


def steps_of_algorithms() -> list[str]:
    ours = [values[1:3] for values in step_times("2026-11-21-algorithms")[1:] if "Muon" not in values[0]]
    return [row(*kahan, *stochastic) for kahan, stochastic in zip(ours[::2], ours[1::2], strict=True)]


def steps_with_states_in_8_bits() -> list[str]:
    by_threads = []
    for name in ("2026-11-23-states-in-8-bits", "2026-11-23-states-in-8-bits-2-threads"):
        (processes,) = recorded_steps(name).values()
        by_threads.append(cells(table_of_8_bits(processes)))
    return [row(*one[1:], *two[1:]) for one, two in zip(*by_threads, strict=True)]


def steps_on_gpus() -> list[str]:
    """Rows of the step's table; torchao was measured on the H200 alone."""
    tables = [{found["optimizer"]: found for found in gpu["step_1b"]["rows"]} for gpu in gpus()]
    found = []
    for name, on_h200 in tables[1].items():
        if name.endswith("nearest"):
            continue
        rows = [rows.get(name) for rows in tables]
        times = [value for row in rows for value in (("–", "–") if row is None else _time_and_ratio(row))]
        found.append(row(name, *times, f"{on_h200['bytes_per_parameter']:g}"))
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
            (peak,) = {f"{of_gpu['peak_gigabytes']:.2f}" for of_gpu in rows}
            found.append(row(*values, f"{size:.2f}", f"{ratio + 1e-9:.2f}", peak).removeprefix("|"))
    return found


def memory_with_activations() -> list[str]:
    peaks = {found["way"]: found["peak_gigabytes"] for found in gpus()[1]["training"][0]["rows"]}
    autocast, stochastic = (
        peaks[way] for way in ("FP32 + BF16 autocast, torch AdamW fused", "BF16, hf_lowprec stochastic")
    )
    gpu = "[one GPU](gpu-step.md#training) with 1.2 billion parameters"
    less = f"{1 - stochastic / autocast:.0%} less than autocast on {gpu}"
    return [f"{less}: {stochastic:.1f} GB instead of {autocast:.1f}"]


def gpus() -> list[dict[str, Any]]:
    return [result(f"gpu-step-{name}") for name in ("h100", "h200")]


def fit(page: str, *words: object) -> tuple[dict[str, list[str]], str]:
    """What `estimate --fit` prints for the configuration in a page's first code block: cells by setting, the text."""
    source = next(block.text for block in blocks(ROOT / page) if "LlamaConfig(" in block.text)
    (name,) = re.findall(r'save_pretrained\("(.*)"\)', source)
    with TemporaryDirectory() as folder:
        exec(source.replace(f'"{name}"', repr(folder)), {})
        printed = hf_lowprec("estimate", folder, "--fit", *words).output.replace(folder, name)
    rows = re.findall(r"^ [ →] (\S.*?)  +(\d.*)$", printed, re.MULTILINE)
    return {title: numbers.split() for title, numbers in rows}, " ".join(printed.split())


PEAK, DISK, HOST = 2, 3, 4


def one_gpu() -> list[str]:
    page, found = "docs/guides/8b-on-one-gpu.md", []
    printed = {memory: fit(page, "--gpu-memory", memory) for memory in (80, 48, 32, 24, 16)}
    best = {80: "split", 48: "stochastic, 8-bit states", 32: "stochastic, factored, 8-bit, release"}
    best[24] = "Adafactor, stochastic, release"
    for memory, title in best.items():
        rows, text = printed[memory]
        found += [f"| {memory} GB | {title}", f"| {rows[title][PEAK]} |"]
        assert f"→ {title} 1" in text
    rows, text = printed[80]
    (missing,) = re.findall(r"Nothing fits: (\S+) GiB are missing", printed[16][1])
    found.append(f"| 16 GB | none: the smallest setting needs {missing} GiB more")
    on_host, split, least = rows["split, states, gradients on host"], rows["split"], rows["stochastic, 8-bit states"]
    found.append(f"in {on_host[PEAK]} GiB of GPU memory and {on_host[HOST]} GiB of host memory")
    found += [f"takes {split[DISK]} GiB with split weights, and {least[DISK]} GiB with stochastic rounding", text]
    sums, _ = fit(page, "--gpu-memory", 80, "--gradient-accumulation-steps", 8)
    found.append(f"peak is {sums['split'][PEAK]} GiB, and {sums['split, 8-bit states'][PEAK]} GiB with 8-bit states")
    chunked, _ = fit(page, "--gpu-memory", 80, "--chunked-loss")
    lower = {title: float(rows[title][PEAK]) - float(chunked[title][PEAK]) for title in rows}
    assert lower["split"] == 0
    return [*found, f"is {lower['split, release']:.2f} GiB lower", f"it stays at {chunked['split'][PEAK]} GiB"]


def many_gpus() -> list[str]:
    page, sums = "docs/guides/64-gpus.md", ("--gradient-accumulation-steps", 4)
    large, text = fit(page, "--gpus", 64, "--gpu-memory", 80, "--batch-size", 4)
    shards, _ = fit(page, "--gpus", 64, "--gpu-memory", 80, *sums)
    whole, _ = fit(page, "--gpus", 64, "--gpu-memory", 1000, *sums)
    of_split = {"4 sequences per GPU": large, "`sync_each_batch`": shards, "whole gradients": whole}
    peaks = {words: float(rows["split"][PEAK]) for words, rows in of_split.items()}
    found = [f"{words} | {peak:.2f} |" for words, peak in peaks.items()]
    found.append(f"every GPU, {peaks['whole gradients'] - peaks['`sync_each_batch`']:.2f} GiB")
    (in_fp32,) = re.findall(r"in FP32 takes (\S+) GiB", text)
    return [*found, f"takes {large['split'][DISK]} GiB, and loading the model in FP32 takes {in_fp32} GiB"]


def muon_on_text() -> list[str]:
    """Losses at the best rate of each way."""
    cases = json.loads((RESULTS / "evidence" / "muon-night.json").read_text(encoding="utf-8"))["cases"]
    best: dict[str, float] = {}
    for case, found in cases.items():
        way, loss = case.split()[0], mean(found["points"][-1]["loss"])
        best[way] = min(loss, best.get(way, loss))
    exact = best["muon-fp32"]
    at_1e_3 = [mean(cases[f"muon-{mode} 0.001"]["points"][-1]["loss"]) for mode in ("nearest", "fp32")]
    higher = best["muon-nearest"] - exact, at_1e_3[0] - at_1e_3[1]
    return [
        f"Muon ends {best['adamw-fp32'] - exact:.3f} nats per byte below AdamW",
        "the loss is {:.3f} higher at the best learning rate and {:.3f} higher at 1e-3".format(*higher),
        f"lowers the loss by a further {exact - best['muonplus-fp32']:.3f}",
    ]


def states_on_the_host() -> list[str]:
    (split,) = (row for row in result("offload-time-h100")["rows"] if row["mode"] == "split")
    step, host = split["states on the host"], split["host alone"]
    return [
        f"took {step:.2f} ns per parameter, which is {8 * step:.1f} s for 8 billion parameters",
        f"the CPU's part alone took {host:.2f} ns",
    ]


def muon_on_many_gpus() -> list[str]:
    return [row(*values) for values in cells(muon_shares.table())]


def requirements() -> list[str]:
    needs = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["trainer"]
    least = {re.split(r"\W", need)[0]: need.partition(">=")[2] for need in needs}
    python = PROJECT["requires-python"].removeprefix(">=")
    versions = (f"{name} {least[name]}" for name in ("torch", "transformers", "accelerate"))
    return [f"needs Python {python}, {next(versions)}, {' and '.join(versions)}, or newer"]


TEXTS: list[tuple[str, Callable[[], list[str]]]] = [
    ("README.md", requirements),
    ("README.md", at_a_glance),
    ("docs/quickstart.md", requirements),
    ("docs/guides/migrating.md", lost_when_migrating),
    ("docs/choosing.md", muon_on_text),
    ("docs/guides/64-gpus.md", muon_on_many_gpus),
    ("docs/guides/states-on-the-host.md", states_on_the_host),
    ("docs/guides/saving.md", losses_of_saved_folders),
    ("docs/performance/index.md", losses_at_a_glance),
    ("docs/performance/index.md", memory_with_activations),
    ("docs/performance/cpu-step.md", steps_on_cpu),
    ("docs/performance/cpu-step.md", time_of_error_feedback),
    ("docs/performance/cpu-step.md", steps_of_algorithms),
    ("docs/performance/cpu-step.md", steps_with_states_in_8_bits),
    ("docs/performance/gpu-step.md", steps_on_gpus),
    ("docs/performance/gpu-step.md", training_on_gpus),
    ("docs/guides/diffusion.md", diffusers_models),
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
def test_a_page_says_what_was_measured(page: str, texts: Callable[[], list[str]]) -> None:
    content = " ".join((ROOT / page).read_text(encoding="utf-8").replace("−", "-").split())
    assert [text for text in texts() if text not in content] == []


def test_extras_that_are_named_exist() -> None:
    sources = [*pages(), *(ROOT / "hf_lowprec").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"pip install[^\n]*'\.\[(\w+)\]", path.read_text("utf-8"))}
    assert len(named) > 3
    assert named <= {*PROJECT["optional-dependencies"]}
