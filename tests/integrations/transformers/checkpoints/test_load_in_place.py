"""Weights that are loaded: into the parameters that a model has, and with all the bits that were saved."""

import operator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM, Trainer

from hf_lowprec.integrations.transformers.checkpoints.load import keep_low_bits_of_checkpoint, load_in_place
from hf_lowprec.rounding import fp32_value
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from tests.support.training.tiny_trainer import arguments, counting_data, llama, trained


def test_values_move_and_parameters_stay():
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
    kept, untouched = model[0].weight, model[1].weight
    with load_in_place(model):
        model[0].weight = nn.Parameter(torch.full((2, 2), 3.0))
        model[0].bias = resized = nn.Parameter(torch.ones(5))
    assert model[0].weight is kept and model[1].weight is untouched
    assert kept.dtype == torch.bfloat16 and kept.requires_grad
    assert torch.equal(kept, torch.full((2, 2), 3.0, dtype=torch.bfloat16))
    assert model[0].bias is resized, "another shape cannot move"


@pytest.mark.parametrize("keeping", [False, True])
def test_low_bits_are_kept_if_asked_for_and_if_there_are_any(keeping):
    dtypes = [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
    model = nn.ParameterList(torch.zeros(3, dtype=before) for before, _ in dtypes)
    old, exact = list(model), 1 + 2**-12
    with load_in_place(model, keeping_low_bits=keeping):
        for k, (_, after) in enumerate(dtypes):
            model[k] = nn.Parameter(torch.full((3,), exact, dtype=after))
    assert all(map(operator.is_, model, old))
    assert [attached_low_bits(param) is not None for param in model] == [keeping, False, False]
    if keeping:
        assert torch.equal(fp32_value(model[0].detach(), attached_low_bits(model[0])), torch.full((3,), exact))


def test_weights_that_are_not_those_of_the_file_have_none(tmp_path):
    model, exact = nn.ParameterDict({"loaded": torch.ones(3), "changed": torch.zeros(3)}).bfloat16(), 1 + 2**-12
    save_file({name: torch.full((3,), exact) for name in model}, tmp_path / "model.safetensors")
    assert keep_low_bits_of_checkpoint(model, tmp_path) == 1
    loaded = model["loaded"]
    assert torch.equal(fp32_value(loaded.detach(), attached_low_bits(loaded)), torch.full((3,), exact))
    assert attached_low_bits(model["changed"]) is None


def norms(tensors: Any) -> dict[str, torch.Tensor]:
    found = {name: tensor.detach().clone() for name, tensor in dict(tensors).items() if "norm" in name}
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    return found


def pretrained() -> LlamaForCausalLM:
    """Its norms are no longer ones."""
    model = llama()
    with torch.no_grad():
        for k, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)), alpha=0.1)
    return model


def test_the_report_says_when_norms_arrive_rounded_and_what_it_advises_keeps_all_bits(tmp_path, capsys):
    settings = {"optim": "adamw_bf16_kahan", "learning_rate": 2e-5, "max_steps": 3}
    first = trained(tmp_path / "first", model=pretrained(), **settings)
    assert "were loaded in" not in capsys.readouterr().out
    first.save_model(str(tmp_path / "saved"))
    learnt = norms(first.model.named_parameters())
    for dtype, said in ((None, 1), (torch.float32, 0)):
        options = {} if dtype is None else {"dtype": dtype}
        model = LlamaForCausalLM.from_pretrained(tmp_path / "saved", **options)
        trainer = Trainer(model, arguments(tmp_path / "again", **settings), train_dataset=counting_data())
        kept = norms(model.named_parameters())
        assert all(torch.equal(kept[name], learnt[name]) for name in learnt) == (not said)
        trainer.train()
        out = capsys.readouterr().out
        assert out.count("were loaded in bfloat16") == said
        assert out.count("from_pretrained(…, dtype=torch.float32)") == said


def test_the_best_norms_are_loaded_with_all_bits(tmp_path):
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trained(
        tmp_path, model=pretrained(), optim="adamw_bf16_kahan", learning_rate=1e-3, max_steps=4, **settings
    )
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2"), "the worst one, so not the last one"
    saved = norms(load_file(tmp_path / "checkpoint-2" / "model.safetensors"))
    for name, tensor in norms(trainer.model.named_parameters()).items():
        assert torch.equal(tensor, saved[name]) and not torch.equal(tensor, tensor.bfloat16().float()), name
