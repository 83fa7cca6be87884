"""`hf-lowprec demo` with a few steps: what it prints, what it writes, and that the variants differ in nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import Result

from hf_lowprec.tools.cli import demo as demo_command
from tests.support.command_output import hf_lowprec, refused

pytest.importorskip("datasets")
pytest.importorskip("matplotlib")

from hf_lowprec.tools.demo import stages
from hf_lowprec.tools.demo.variants import VARIANTS

STEPS = 6
HEADINGS = ("way", "validation", "compared", "weights", "grads", "state", "updates", "seconds")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
BF16_ULP = 2.0**-8


def invoke(*arguments: str | Path) -> Result:
    return hf_lowprec("demo", *arguments)


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def done(folder: Path) -> Result:
    """The built-in demonstration in every variant, once for all tests."""
    # Evaluation is most of so short a run.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "VALIDATION_BLOCKS", 8)
        result = invoke("--steps", STEPS, "--ways", ",".join(VARIANTS), "--output-dir", folder)
    assert result.exit_code == 0, result.output
    return result


def test_the_tables_have_every_variant_and_column_uncut(done: Result, folder: Path) -> None:
    assert "…" not in done.output
    for heading in HEADINGS:
        assert done.output.count(heading) >= 2, heading
    for variant in VARIANTS.values():
        assert sum(line.strip().startswith(f"{variant.label}  ") for line in done.output.splitlines()) == 2
    assert "norms included" in done.output
    assert str(folder / "results.json") in done.output.replace("\n", "")


def test_the_table_shows_the_numbers_of_the_file(done: Result, folder: Path) -> None:
    for stage in results(folder)["stages"]:
        exact = stage["runs"].pop("fp32")
        for name, run in stage["runs"].items():
            shown = (f"{run['final']:.4f}", f"{run['final'] - exact['final']:+.4f}")
            rows = [line.split() for line in done.output.splitlines() if line.strip().startswith(VARIANTS[name].label)]
            assert any(set(shown) <= set(row) for row in rows), (name, shown)


@pytest.mark.parametrize("stage", ["pretraining", "fine-tuning"])
def test_the_plot_is_a_png_of_its_size(done: Result, folder: Path, stage: str) -> None:
    image = (folder / f"{stage}.png").read_bytes()
    assert image.startswith(PNG_SIGNATURE)
    width, height = (int.from_bytes(image[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (990, 720)


def test_every_run_has_its_number(done: Result) -> None:
    lines = done.output.splitlines()
    assert lines[0] == "10 runs of 6 steps. Loading torch and transformers ..."
    assert lines[1] == "run 1 of 10: pretraining, FP32 AdamW"
    assert lines[2].startswith("run 1 of 10: pretraining, FP32 AdamW     validation loss 5.5")
    assert lines[20].startswith("run 10 of 10: fine-tuning, BF16 Kahan")


def test_a_file_says_at_once_which_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as log, demo_command._Progress(Console(file=log), 8, 1000) as progress:
        progress.callbacks.on_run("pretraining", VARIANTS["fp32"])
        progress.callbacks.on_step()
        assert (tmp_path / "log").read_text() == "run 1 of 8: pretraining, FP32 AdamW\n"
        monkeypatch.setattr(demo_command, "SILENCE", -1.0)
        progress.callbacks.on_step()
        assert (tmp_path / "log").read_text().endswith("\nrun 1 of 8: pretraining, FP32 AdamW, step 2 of 1000\n")


def test_the_time_is_said() -> None:
    assert "8 runs of 1000 steps, about 5 minutes" in demo_command._plan(8, demo_command.STEPS, True)
    assert "about" not in demo_command._plan(8, demo_command.STEPS, False)


def test_the_file_holds_both_stages_and_everything_to_do_it_again(done: Result, folder: Path) -> None:
    found = results(folder)
    assert [stage["name"] for stage in found["stages"]] == ["pretraining", "fine-tuning"]
    assert found["seed"] == 0 and torch.__version__.startswith(found["versions"]["torch"])
    for stage in found["stages"]:
        assert list(stage["runs"]) == [*VARIANTS]
        assert stage["settings"]["steps"] == STEPS
        assert stage["blocks"] == {"train": STEPS * stages.BATCH_SIZE, "validation": 8, "length": 128}
        for run in stage["runs"].values():
            assert [step for step, _ in run["validation"]] == list(range(STEPS + 1))
            assert run["seconds"] > 0
            assert run["final"] == run["validation"][-1][1] and run["start"] == run["validation"][0][1]


def test_measured_bytes_are_what_the_dtypes_say(done: Result, folder: Path) -> None:
    model = stages.small_llama(0)
    tensors = list(model.parameters())
    total = sum(p.numel() for p in tensors)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name) / total
    torchs_step, step = 4 * len(tensors) / total, 8 * len(tensors) / total  # an FP32 scalar per tensor, or an int64 one
    mixed = 2 + 2 * norms
    expected = {
        "fp32": {"weights": 4, "gradients": 4, "state": 8 + torchs_step},
        "nearest": {"weights": 2, "gradients": 2, "state": 4 + torchs_step},
        # An FP32 norm has FP32 moments, no remainder and no compensation.
        "split": {"weights": mixed, "gradients": mixed, "state": 6 * (1 - norms) + 8 * norms + step},
        "kahan": {"weights": mixed, "gradients": mixed, "state": 6 * (1 - norms) + 8 * norms + step},
        "sr": {"weights": mixed, "gradients": mixed, "state": 4 * (1 - norms) + 8 * norms + step},
    }
    for stage in results(folder)["stages"]:
        assert stage["parameters"] == total
        for name, run in stage["runs"].items():
            assert run["bytes_per_parameter"] == pytest.approx(expected[name], rel=1e-9), name


def test_all_variants_see_the_same_weights_and_data(done: Result, folder: Path) -> None:
    for stage in results(folder)["stages"]:
        runs = stage["runs"]
        for run in runs.values():
            assert run["training"][0][0] == 1
            assert run["training"][0][1] == pytest.approx(runs["fp32"]["training"][0][1], rel=BF16_ULP / 4)
            assert run["start"] == pytest.approx(runs["fp32"]["start"], rel=BF16_ULP / 4)
        # Norms aside, ours start from the same bits.
        assert runs["split"]["training"][0] == runs["kahan"]["training"][0] == runs["sr"]["training"][0]


def test_lost_updates_tell_the_variants_apart(done: Result, folder: Path) -> None:
    lost = {name: run["lost_updates"] for name, run in results(folder)["stages"][1]["runs"].items()}
    assert abs(lost["fp32"]) < 1e-4
    assert lost["nearest"] > 0.3
    assert abs(lost["split"]) < 1e-4
    assert abs(lost["kahan"]) < 0.01
    assert abs(lost["sr"]) < 0.1


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved Llama in BF16 and a word tokenizer, as a folder of transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("own-model")
    words = {word: k for k, word in enumerate(["<unk>", *(f"w{k}" for k in range(30))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def own_text(folder: Path, suffix: str) -> Path:
    rows = [" ".join(f"w{(7 * i + j * j) % 30}" for j in range(12)) for i in range(60)]
    path = folder / f"text{suffix}"
    if suffix == ".txt":
        path.write_text("\n".join(rows))
    else:
        path.write_text("\n".join(json.dumps({"body": row}) for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_model_and_a_dataset_of_ones_own(own_model: Path, tmp_path: Path, suffix: str) -> None:
    data = own_text(tmp_path, suffix)
    column = [] if suffix == ".txt" else ["--text-column", "body"]
    asked = ["--model", own_model, "--dataset", data, "--steps", 3, "--length", 16, "--batch-size", 2]
    result = invoke(*asked, *column, "--ways", "sr, fp32", "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = results(tmp_path / "out")
    (stage,) = found["stages"]
    assert found["model"] == str(own_model)
    assert list(stage["runs"]) == ["fp32", "sr"]
    assert stage["settings"]["learning_rate"] == 2e-5
    assert stage["runs"]["fp32"]["bytes_per_parameter"]["weights"] == 4
    assert stage["runs"]["fp32"]["start"] == pytest.approx(math.log(32), rel=0.05)
    assert (tmp_path / "out" / "fine-tuning.png").is_file()


def test_a_folder_of_text_files_is_a_dataset(own_model: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    own_text(tmp_path / "texts", ".txt")
    asked = ["--model", own_model, "--dataset", tmp_path / "texts", "--steps", 1, "--length", 8, "--batch-size", 2]
    result = invoke(*asked, "--ways", "kahan", "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ways", "fp32,khan"], "unknown: khan; valid are fp32, nearest, split, sr, kahan"),
        (["--ways", ","], "none given"),
        (["--dataset", "text.txt"], "--dataset needs --model"),
        (["--batch-size", "8"], "--batch-size needs --model"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--model", "./nowhere"], "there is no file or folder './nowhere'"),
        (["--model", "{model}", "--dataset", "./nowhere.txt"], "there is no file or folder './nowhere.txt'"),
        (["--model", "{model}", "--dataset", "{data}", "--text-column", "body"], "has no column 'body'"),
        (["--model", "{model}", "--dataset", "{numbers}", "--text-column", "x"], "contains no text"),
        (["--model", "{model}", "--dataset", "{data}", "--length", "256"], "takes at most 128 tokens"),
        (["--model", "{model}", "--dataset", "{short}", "--length", "8"], "too little text"),
        (["--model", "{model}", "--dataset", "{empty}"], "a file of a supported type"),
        (["--model", "{empty}"], "cannot be loaded"),
    ],
)
def test_bad_input_is_an_error_that_says_why(own_model: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "numbers.csv").write_text("x\n1\n2\n3\n")
    (tmp_path / "short.txt").write_text("w1 w2\nw3 w4\n")
    places = {
        "model": own_model,
        "data": own_text(tmp_path, ".txt"),
        "numbers": tmp_path / "numbers.csv",
        "short": tmp_path / "short.txt",
        "empty": tmp_path / "empty",
    }
    assert says in refused("demo", *(word.format(**places) for word in arguments), "--output-dir", tmp_path / "out")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None if name == "datasets" else object())
    result = invoke("--output-dir", tmp_path)
    assert result.exit_code == 1
    assert "the demo needs datasets: pip install 'hf-lowprec[demo]'" in result.output
