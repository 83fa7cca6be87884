"""The names and the words of `--optim` and `--optim_args`: what they reach, and how a wrong one is refused."""

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

import hf_lowprec
from tests.integrations.tiny_training import arguments, llama, optimizer_of, trained


def test_names_on_the_command_line():
    parser = HfArgumentParser(TrainingArguments)
    for name in hf_lowprec.OPTIMIZER_NAMES:
        (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--optim", name])
        assert args.optim == name
    with pytest.raises((SystemExit, ValueError)):
        parser.parse_args_into_dataclasses(["--output_dir", "out", "--optim", "adamw_bf16_kahn"])


def test_optim_args_reach_every_keyword(tmp_path):
    words = (
        "betas=0.8|0.95, eps=1e-6, amsgrad=True, maximize=false, rounding=nearest, state_rounding=nearest, "
        "state_dtype=exp_avg:float32|exp_avg_sq:bf16, seed=11, backend=eager, weight_decay=0.3, keep_fp32=lm_head|*.mlp"
    )
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", optim_args=words, max_steps=1)
    optimizer = optimizer_of(trainer)
    group = optimizer.param_groups[0]
    assert optimizer.backend == "eager"
    assert group["betas"] == (0.8, 0.95)
    assert (group["eps"], group["amsgrad"], group["maximize"], group["seed"]) == (1e-6, True, False, 11)
    assert (group["rounding"], group["state_rounding"]) == ("nearest", "nearest")
    assert group["state_dtype"] == {"exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}
    assert optimizer.defaults["weight_decay"] == 0.3
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert trainer.model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("momentun=0.9", r"'momentun' is not an argument of .*did you mean 'momentum'"),
        ("rounding=kahn", r"rounding='kahn'.*'kahan', 'stochastic', 'nearest'"),
        ("nesterov=maybe", r"nesterov='maybe' does not parse; give True or False"),
        ("momentum=fast", r"momentum='fast' does not parse; give a number"),
        ("state_dtype=float8", r"state_dtype='float8' does not parse; give bfloat16"),
        ("momentum", r"'momentum' is not of the form key=value"),
        ("seed=1,seed=2", r"names 'seed' twice"),
        ("momentum=-1", r"momentum=-1.0 is invalid; it must be a finite number >= 0"),
    ],
)
def test_bad_optim_args_name_what_is_wrong(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, optim="sgd_bf16_kahan", optim_args=words)


def test_unknown_optim_args_fail_before_anything_is_cast(tmp_path):
    model = llama()
    with pytest.raises(ValueError, match="'beta'"):
        Trainer(model=model, args=arguments(tmp_path, optim="adamw_bf16_kahan", optim_args="beta=0.9"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
