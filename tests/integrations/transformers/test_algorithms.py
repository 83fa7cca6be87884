"""Every algorithm under Trainer: it learns, logs, and continues bit for bit from a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from hf_lowprec import OPTIMIZER_NAMES, hidden_matrices
from tests.support.chosen_cases import nightly_except
from tests.support.training.tiny_trainer import (
    LOAD_BEST,
    assert_pure_bf16,
    assert_same,
    llama,
    logged,
    losses,
    optimizer_of,
    trained,
)

SHORT = ("adafactor", "lion", "muon", "prodigy", "schedulefree", "stable")
CASES = [(*name.split("_bf16_"), "d0=1e-3" if "prodigy" in name else None) for name in OPTIMIZER_NAMES]
CASES += [("adamw", "sr", "state_dtype=int8"), ("sgd", "kahan", "rounding=nearest,momentum=0.9")]
RATES = {"lion": 2e-3, "sgd": 0.3, "radam": 0.1, "prodigy": 1.0}  # RAdam's first steps are those of SGD


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("algorithm", "mode", "optim_args"),
    nightly_except([case for case in CASES if case[0].startswith(SHORT) or case[2] == "state_dtype=int8"], CASES),
)
def test_a_trainer_learns_and_resumes_bit_for_bit(tmp_path, algorithm, mode, optim_args):
    settings = {"optim": f"{algorithm}_bf16_{mode}", "learning_rate": RATES.get(algorithm, 1e-2), "weight_decay": 0.1}
    settings |= {"save_strategy": "steps", "save_steps": 6, "max_grad_norm": 1.0, "optim_args": optim_args}
    whole = trained(tmp_path, **settings)
    assert losses(whole)[-1] < 0.95 * losses(whole)[0]
    assert_pure_bf16(whole.model)
    if "nearest" not in str(optim_args):
        assert all(abs(lost) < (0.01 if mode == "kahan" else 0.5) for lost in logged(whole, "lost_updates"))
    assert_same(trained(tmp_path, model=llama(seed=1), resume=str(tmp_path / "checkpoint-6"), **settings), whole)


@pytest.mark.parametrize(
    "settings", [{"save_strategy": "steps", "save_steps": 6}, LOAD_BEST], ids=["saves", "loads best"]
)
def test_a_trainer_saves_and_ends_with_averages(tmp_path, settings):
    trainer = trained(tmp_path, optim="schedulefreeadamw_bf16_split", lr_scheduler_type="constant", **settings)
    saved = load_file(tmp_path / "checkpoint-12" / "model.safetensors")
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, saved["model.layers.0.mlp.up_proj.weight"])
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(tmp_path / "saved")
    assert torch.equal(weight, load_file(tmp_path / "saved" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"])
    if settings is LOAD_BEST:
        assert evaluated == min(logged(trainer, "eval_loss"))
    averages = weight.detach().clone()
    optimizer_of(trainer).train()
    assert (weight != averages).double().mean() > 0.5


def test_muon_takes_the_hidden_matrices_and_leaves_the_rest_to_adamw(tmp_path, caplog):
    caplog.set_level("INFO")
    trainer = trained(tmp_path, optim="muon_bf16_kahan", weight_decay=0.1, optim_args="momentum=0.9,betas=0.8|0.9")
    groups = optimizer_of(trainer).param_groups
    matrices = {id(param) for param in hidden_matrices(trainer.model)}
    assert len(matrices) == 2 * 7
    assert {id(p) for group in groups for p in group["params"] if group["use_muon"]} == matrices
    assert {(g["use_muon"], g["weight_decay"], g["momentum"], g["betas"]) for g in groups} == {
        (True, 0.1, 0.9, (0.8, 0.9)),  # what is a matrix decays
        (False, 0.1, 0.9, (0.8, 0.9)),  # embeddings and head
        (False, 0.0, 0.9, (0.8, 0.9)),  # norms
    }
    size = sum(param.numel() for param in trainer.model.parameters() if id(param) in matrices)
    assert f"orthogonalized  14 parameters, {size:,} elements; AdamW steps the others" in caplog.text
