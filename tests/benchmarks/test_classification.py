"""The logic of the classification benchmark, and all of it once on tiny sizes."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

datasets = pytest.importorskip("datasets")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

from classification import accuracies, accuracy_table, largest_difference, main, majority, norm_table  # noqa: E402
from encoder.fine_tuning import NormMoves, Outcome, norm_moves, norm_weights  # noqa: E402
from encoder.pretraining import Pretraining, pretrained, word_pieces  # noqa: E402
from encoder.text import HELD_OUT, PACKAGES, Corpus, corpus, glue, passages, unlabelled  # noqa: E402

from hf_lowprec.tools.demo.report import json_text  # noqa: E402

STILL = NormMoves(4, 0.25, (0.5, 1.0, 2.0), 0.75, 1.0, 0.0)


@pytest.fixture(scope="module")
def texts() -> Corpus:
    return corpus()


@pytest.fixture(scope="module")
def tokenizer(texts):
    return word_pieces(texts.pretraining[:40], 400)


def outcome(accuracy: float, loss: float, training: list[float]) -> Outcome:
    steps = list(enumerate(training, start=1))
    return Outcome((0.1, accuracy), (2.0, loss), steps, STILL, {}, 1.0)


def test_differences_are_paired_by_seed():
    by_seed = [
        {"fp32": outcome(0.80, 0.5, [3, 1]), "kahan": outcome(0.81, 0.4, [3, 1.25])},
        {"fp32": outcome(0.90, 0.3, [2, 1]), "kahan": outcome(0.90, 0.3, [1.5, 1])},
    ]
    exact, ours = accuracies(by_seed)
    assert exact.differences == exact.loss_differences == [0, 0]
    assert ours.differences == pytest.approx([0.01, 0])
    assert ours.loss_differences == pytest.approx([-0.1, 0])
    assert ours.fp32_noise == pytest.approx(0.1 / math.sqrt(2))  # of 0.8 and 0.9
    assert largest_difference(by_seed[1]["kahan"], by_seed[1]["fp32"]) == 0.5
    row = accuracy_table([exact, ours], by_seed).splitlines()[-1]
    assert "85.50% ± 6.36%" in row
    assert "+0.50% ± 0.71%" in row
    assert row.endswith("0.5000 |")  # the largest over seeds


def test_one_seed_has_no_noise():
    by_seed = [{"fp32": outcome(0.8, 0.5, [1])}]
    (only,) = accuracies(by_seed)
    assert math.isnan(only.fp32_noise)
    assert "| 80.00% |  | 0.5000 |" in accuracy_table([only], by_seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_moved_is_equal_bits(dtype):
    before = torch.tensor([1, 1, -0.5, 2], dtype=dtype)
    after = torch.tensor([1, 1 + 2**-7, -0.5, 2], dtype=dtype)
    moves = norm_moves(before, after)
    assert (moves.elements, moves.ones, moves.never_moved, moves.same_in_bfloat16) == (4, 0.5, 0.75, 0.75)
    assert moves.magnitudes == (0.5, 1, 2)


def test_a_move_below_half_an_ulp_is_one_in_float32_alone():
    before = torch.ones(2)
    moves = norm_moves(before, before + torch.tensor([2**-10, 2**-6]))  # 1 ± 2⁻¹⁰ round to 1 in BF16
    assert (moves.never_moved, moves.same_in_bfloat16) == (0, 0.5)
    assert norm_moves(torch.zeros(1), -torch.zeros(1)).never_moved == 0  # equal, but not the same bits


def test_norm_weights_are_those_of_norms_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.RMSNorm(3))
    assert norm_weights(model).tolist() == [1] * 5


def test_no_file_is_on_both_sides(texts):
    for train, validation in zip(texts.train, texts.validation, strict=True):
        assert not set(train) & set(validation)
        assert len(validation) in (len(train + validation) // HELD_OUT, len(train + validation) // HELD_OUT + 1)
        share = sum(map(len, validation)) / sum(map(len, train + validation))
        assert 0.1 < share < 0.5
    assert not {text for files in texts.validation for text in files if text} & set(texts.pretraining)


def test_passages_are_whole_and_of_all_classes(texts, tokenizer):
    rows = passages([files[:3] for files in texts.train], tokenizer, 16, most=5)
    assert {len(row) for row in rows["input_ids"]} == {16}
    assert rows["labels"] == [label for label in range(len(PACKAGES)) for _ in range(5)]
    # The first passage of a class is the beginning of its first file.
    tokens = tokenizer(texts.train[0][0], add_special_tokens=False)["input_ids"]
    assert rows["input_ids"][0] == [tokenizer.cls_token_id, *tokens[:14], tokenizer.sep_token_id]


def test_passages_are_spread_over_the_text(tokenizer):
    text = " ".join("abcdefghijkl")
    every = passages([[text]], tokenizer, 4, most=99)["input_ids"]
    assert len(every) == 6  # pairs of letters
    assert passages([[text]], tokenizer, 4, most=3)["input_ids"] == every[::2]
    assert unlabelled([text, text], tokenizer, 4, most=8)["input_ids"] == [*every, *every[:2]]


def test_a_task_of_glue_is_padded_to_one_length(monkeypatch, tokenizer):
    rows = {"sentence1": ["a b", "c"], "sentence2": ["d", "e f g h"], "label": [1, 0], "idx": [0, 1]}
    split = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    loaded = datasets.DatasetDict(train=split, validation=split.select([1]))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, task: {("nyu-mll/glue", "mrpc"): loaded}[name, task])
    task = glue("mrpc", tokenizer, 6)
    assert (task.classes, len(task.train), task.validation["labels"][:]) == (2, 2, [0])
    a, b, d = tokenizer.convert_tokens_to_ids(["a", "b", "d"])
    assert task.train["input_ids"][0][:3] == tokenizer("a b", "d")["input_ids"][:3]
    assert {a, b, d} < set(task.train["input_ids"][0])
    assert [len(row) for row in task.train["input_ids"]] == [6, 6]
    assert set(task.train.column_names) <= {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert majority(task) == 1


def test_a_norm_table_has_a_row_for_each_way():
    runs = {"small": {"FP32": outcome(1, 1, [1]), "BF16": outcome(1, 1, [1])}}
    table = norm_table(runs)
    assert "| FP32 | 75.0% |" in table
    assert "25.0% exactly 1" in table


@pytest.mark.every_case
@pytest.mark.slow
def test_everything_runs_once(tmp_path, capsys):
    sizes = ["--steps", "4", "--seeds", "0", "--passages", "8", "--norm-steps", "2", "--length", "16"]
    small = ["--pretraining-steps", "2", "--hidden", "32", "--llama-steps", "2"]
    folders = ["--work", str(tmp_path), "--output-dir", str(tmp_path)]
    found = json.loads(main([*sizes, *small, *folders]).read_text())
    printed = capsys.readouterr().out
    assert "| BF16 Kahan |" in printed
    assert "| BF16 Kahan, norms in BF16 |" in printed
    assert set(found["norms"]["models"]) == {
        *("encoder, pre-trained", "encoder, random"),
        *("Llama, pre-trained", "Llama, random"),
    }
    for runs in found["norms"]["models"].values():
        assert runs["FP32 AdamW"]["norms"]["never_moved"] < 0.5
        assert runs["BF16 nearest"]["norms"]["never_moved"] > 0.9
    # Made once: the same settings find the encoder.
    weights = tmp_path / "encoder" / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    made = pretrained(Pretraining(steps=2, hidden=32, length=16), tmp_path / "encoder")
    assert weights.stat().st_mtime_ns == stamp
    assert json_text(made) == json_text(found["pretraining"])
    # Other variants, with the same encoder.
    chosen = ["--ways", "fp32,split,split-8bit", "--norm-steps", "0"]
    found = json.loads(main([*sizes, *small, *folders, *chosen]).read_text())
    assert weights.stat().st_mtime_ns == stamp
    assert set(found["ways"]) == set(found["runs"][0]) - {"seed"} == {"fp32", "split", "split-8bit"}
    (run,) = found["runs"]
    assert run["fp32"]["state_dtypes"] == {"exp_avg": ["float32"], "exp_avg_sq": ["float32"]}
    assert run["split"]["state_dtypes"]["exp_avg_sq"] == ["bfloat16", "float32"]  # norms are FP32, and so are theirs
    assert run["split-8bit"]["state_dtypes"]["exp_avg_sq_code"] == ["int8"]
    assert "| BF16 split, 8-bit states |" in capsys.readouterr().out
