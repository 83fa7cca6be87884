"""Directions of updates from the moments in checkpoints, against the updates that the optimizer makes."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import hf_lowprec
from hf_lowprec.integrations.checkpoint_files.stored_weights import open_weights
from hf_lowprec.tools.doctor.update_sizes import saved_directions
from tests.support.training.tiny_trainer import trained

NAMES = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]


def trained_weights() -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    """Two matrices after five steps; the gradients of one of them agree from step to step."""
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(8, 8)) for name in NAMES}
    optimizer = torch.optim.AdamW(weights.values(), lr=1.0, weight_decay=0.0, betas=(0.8, 0.99))
    for _ in range(5):
        weights[NAMES[0]].grad, weights[NAMES[1]].grad = torch.randn(8, 8), 1 + 0.01 * torch.randn(8, 8)
        optimizer.step()
    return weights, optimizer


def expected(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> torch.Tensor:
    """The size of the last update: bias-corrected by hand."""
    state = optimizer.state[weight]
    first, second = state["exp_avg"] / (1 - 0.8**5), state["exp_avg_sq"] / (1 - 0.99**5)
    return (first / (second.sqrt() + 1e-8)).abs().flatten().double()


@pytest.mark.parametrize("form", ["numbers", "names", "sharded"])
def test_directions_are_the_updates_in_units_of_the_learning_rate(tmp_path, form):
    weights, optimizer = trained_weights()
    save_file({name: weight.detach() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    saved = optimizer.state_dict()
    if form != "numbers":
        saved["state"] = {NAMES[key]: state for key, state in saved["state"].items()}
        saved["param_groups"][0]["params"] = NAMES
    if form == "sharded":
        dcp.save({"optimizer": saved}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    else:
        torch.save(saved, tmp_path / "optimizer.bin")
    found = saved_directions(tmp_path, open_weights(tmp_path))
    both = [expected(optimizer, weight) for weight in weights.values()]
    torch.testing.assert_close(found["all"], torch.cat(both), rtol=1e-5, atol=1e-8)  # FP32 here, FP64 there
    if form == "numbers":
        assert [*found] == ["all"]
    else:
        torch.testing.assert_close(found["mlp"], both[0], rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(found["head"], both[1], rtol=1e-5, atol=1e-8)
        assert found["head"].mean() > 0.99  # gradients that agree


def test_a_checkpoint_of_trainer_with_our_optimizer_has_names(tmp_path):
    trained(tmp_path, optim="adamw_bf16_kahan", max_steps=2, save_strategy="steps", save_steps=2)
    folder = tmp_path / "checkpoint-2"
    assert {*saved_directions(folder, open_weights(folder))} == {
        "all",
        "embeddings",
        "attention",
        "mlp",
        "norms",
        "head",
    }


@pytest.mark.parametrize("algorithm", [None, "SGD", "AdamW"])
def test_without_moments_there_are_none(tmp_path, algorithm):
    """No optimizer, one without moments, and one that has not stepped yet."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    save_file({"lm_head.weight": weight.detach()}, tmp_path / "model.safetensors")
    if algorithm:
        optimizer = getattr(hf_lowprec, algorithm)([weight], lr=0.1)
        if algorithm == "SGD":
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert saved_directions(tmp_path, open_weights(tmp_path)) == {}


def test_tensors_have_shares_in_proportion_to_their_size(tmp_path):
    weights = [torch.nn.Parameter(torch.ones(size)) for size in (3000, 1000)]
    optimizer = torch.optim.AdamW(weights)
    for k, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, 1 + k)
    optimizer.step()
    for k, state in enumerate(optimizer.state.values()):
        state["exp_avg"] *= k + 1  # directions of 1 and 2
    save_file({f"{k}.weight": weight.detach() for k, weight in enumerate(weights)}, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (found,) = saved_directions(tmp_path, open_weights(tmp_path)).values()
    assert (found > 1.5).double().mean() == pytest.approx(0.25, abs=0.01)
