"""Every algorithm under Trainer: it learns, logs, and continues bit for bit from a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from hf_lowprec import OPTIMIZER_NAMES, hidden_matrices
from tests.support.training.tiny_trainer import LOAD_BEST, assert_pure_bf16, llama, losses, optimizer_of, trained

SHORT = ("adafactor", "lion", "muon", "prodigy", "schedulefree", "stable")
RATES = {"lion": 2e-3, "sgd": 0.3, "radam": 0.1, "prodigy": 1.0}  # RAdam's first steps are those of SGD


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        pytest.param(*name.split("_bf16_"), marks=() if name.startswith(SHORT) else pytest.mark.every_case)
        for name in OPTIMIZER_NAMES
        if not name.startswith("adamw")
    ],
)
def test_a_trainer_learns_and_resumes_bit_for_bit(tmp_path, algorithm, mode):
    settings = {"optim": f"{algorithm}_bf16_{mode}", "learning_rate": RATES.get(algorithm, 1e-2), "weight_decay": 0.1}
    settings |= {"save_strategy": "steps", "save_steps": 6, "max_grad_norm": 1.0}
    settings |= {"optim_args": "d0=1e-3"} if algorithm == "prodigy" else {}  # there are only twelve steps
    whole = trained(tmp_path, **settings)
    assert losses(whole)[-1] < 0.95 * losses(whole)[0]
    assert_pure_bf16(whole.model)
    logs = [entry for entry in whole.state.log_history if "loss" in entry]
    assert all(abs(entry["lost_updates"]) < (0.01 if mode == "kahan" else 0.5) for entry in logs)
    resumed = trained(tmp_path, model=llama(seed=1), resume=str(tmp_path / "checkpoint-6"), **settings)
    for (key, ours), other in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, other), key
    for ours, other in zip(optimizer_of(resumed).state.values(), optimizer_of(whole).state.values(), strict=True):
        assert ours.keys() == other.keys()
        assert all(torch.equal(ours[key], other[key]) for key in ours)


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
        assert evaluated == min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    averages = weight.detach().clone()
    optimizer_of(trainer).train()
    assert (weight != averages).double().mean() > 0.5


def test_muon_takes_the_hidden_matrices_and_leaves_the_rest_to_adamw(tmp_path):
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


def test_a_list_of_parameters_is_no_word(tmp_path):
    with pytest.raises(ValueError, match="'matrices' is not an argument of optim_args for optim='muon_bf16_kahan'"):
        trained(tmp_path, optim="muon_bf16_kahan", optim_args="matrices=all")
