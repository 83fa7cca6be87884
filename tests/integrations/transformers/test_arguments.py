"""The names and the words of `--optim` and `--optim_args`: what they reach, and how a wrong one is refused."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_lowprec
from hf_lowprec.integrations.transformers import arguments as parsing
from hf_lowprec.integrations.transformers.arguments import (
    OptimArgs,
    checked_arguments,
    optim_args_of,
    optimizer_arguments,
)
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


def test_optim_args_are_parsed_into_one_object(tmp_path):
    text = "betas=0.8|0.95,keep_fp32=lm_head|*.mlp,grad_accumulation=kahan,check_replicas_every=5,amsgrad=yes"
    options = optim_args_of(arguments(tmp_path, optim="adamw_bf16_kahan", optim_args=text))
    assert options == OptimArgs({"betas": (0.8, 0.95), "amsgrad": True}, ("lm_head", "*.mlp"), "kahan", 5)
    assert optim_args_of(arguments(tmp_path, optim="adamw_bf16_kahan")) == OptimArgs()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.keep_fp32 = ()
    with pytest.raises(TypeError):
        options.optimizer["betas"] = (0.9, 0.9)


def test_optim_args_are_parsed_once_for_a_run(tmp_path, monkeypatch):
    parsed, parse = [], parsing._option_strings
    monkeypatch.setattr(parsing, "_option_strings", lambda text: (parsed.append(text), parse(text))[1])
    text = "seed=3,eps=1.0625e-7"  # in no other test, and none has parsed it before
    trained(tmp_path, optim="adamw_bf16_kahan", optim_args=text, max_steps=1)
    assert parsed == [text]


def test_optim_args_that_a_search_changes_are_parsed_again(tmp_path):
    """Trainer's hyperparameter search sets the arguments of a trial on the same object."""
    args = arguments(tmp_path, optim="adamw_bf16_kahan", optim_args="eps=1e-7")
    assert optimizer_arguments(args)[1]["eps"] == 1e-7
    args.optim_args, args.learning_rate = "eps=1e-6", 3e-4
    assert {key: optimizer_arguments(args)[1][key] for key in ("eps", "lr")} == {"eps": 1e-6, "lr": 3e-4}


@pytest.mark.parametrize("name", hf_lowprec.OPTIMIZER_NAMES)
def test_untouched_fields_leave_every_algorithm_its_own_defaults(tmp_path, name):
    args = arguments(tmp_path, optim=name)
    cls, given = optimizer_arguments(args)
    assert set(given) == {"rounding", "lr", "seed"}
    assert checked_arguments(args) == given
    assert cls.__name__.lower() == name.partition("_")[0]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("adamw", {"adam_beta2": 0.95, "adam_epsilon": 1e-6}, {"betas": (0.9, 0.95), "eps": 1e-6}),
        ("lion", {"adam_beta1": 0.95, "adam_epsilon": 1e-6}, {"betas": (0.95, 0.99)}),
        ("lion", {"adam_beta1": 0.95, "optim_args": "betas=0.8|0.9"}, {"betas": (0.8, 0.9)}),
        ("adan", {"adam_epsilon": 1e-6, "optim_args": "no_prox=True"}, {"eps": 1e-6, "no_prox": True}),
        ("adan", {"adam_beta2": 0.95, "optim_args": "betas=0.9|0.8|0.7"}, {"betas": (0.9, 0.8, 0.7)}),
        (
            "radam",
            {"optim_args": "decoupled_weight_decay=True,eps=1e-5"},
            {"decoupled_weight_decay": True, "eps": 1e-5},
        ),
        ("sgd", {"adam_beta1": 0.95}, {}),
    ],
)
def test_changed_fields_and_words_reach_the_algorithms_that_have_them(tmp_path, name, settings, expected):
    given = checked_arguments(arguments(tmp_path, optim=f"{name}_bf16_kahan", **settings))
    assert {key: given[key] for key in given.keys() - {"rounding", "lr", "seed"}} == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adam_beta2": 0.95}, r"adam_beta2 cannot be used with optim='adan_bf16_sr'.*are 3.*'betas=0.98\|0.92\|0.99'"),
        ({"optim_args": "betas=0.9|0.99"}, r"betas='0.9\|0.99' does not parse; give 3 numbers as 0.98\|0.92\|0.99"),
        ({"optim_args": "betas=0.9|0.9|fast"}, r"betas='0.9\|0.9\|fast' does not parse; give 3 numbers"),
        ({"optim_args": "betas=0.9|0.9|1"}, r"betas\[2\]=1.0 is invalid; it must be a number >= 0 and < 1"),
    ],
)
def test_three_betas_are_not_two(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        checked_arguments(arguments(tmp_path, optim="adan_bf16_sr", **settings))


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
        ("momentum=-1", r"momentum=-1.0 is invalid; it must be a number >= 0"),
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


def test_saved_arguments_bring_their_names_along(tmp_path):
    """`training_args.bin`, which Trainer saves with every model, in a process that has not imported us."""
    torch.save([arguments(tmp_path, optim=name) for name in hf_lowprec.OPTIMIZER_NAMES], tmp_path / "training_args.bin")
    body = f"""
import sys, torch
sys.modules["hf_lowprec"] = None  # as if it were not installed
try:
    torch.load({str(tmp_path / "training_args.bin")!r}, weights_only=False)
except ModuleNotFoundError as error:
    print(error)
del sys.modules["hf_lowprec"]
found = torch.load({str(tmp_path / "training_args.bin")!r}, weights_only=False)
assert {{type(args.optim).__name__ for args in found}} == {{"OptimizerNames"}}
print(*(args.optim.value for args in found))
"""
    result = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    without, names = result.stdout.splitlines()
    assert "hf_lowprec" in without
    assert names.split() == list(hf_lowprec.OPTIMIZER_NAMES)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_names_stay_members_through_pickles_and_copies(protocol):
    for name in hf_lowprec.OPTIMIZER_NAMES:
        member = OptimizerNames(name)
        assert pickle.loads(pickle.dumps(member, protocol)) is member
        assert copy.deepcopy(member) is copy.copy(member) is member
    stock = OptimizerNames.ADAMW_TORCH
    assert b"hf_lowprec" not in pickle.dumps(stock, protocol)
    assert pickle.loads(pickle.dumps(stock, protocol)) is stock


def test_arguments_that_were_saved_by_value_still_load():
    """As files of before: a reference to the enum, and the value."""
    member = OptimizerNames("adamw_bf16_kahan")
    assert pickle.loads(b"ctransformers.training_args\nOptimizerNames\n(S'adamw_bf16_kahan'\ntR.") is member


def test_names_load_where_only_listed_types_do(tmp_path):
    torch.save({"optim": OptimizerNames("adamw_bf16_sr")}, tmp_path / "args.bin")
    assert torch.load(tmp_path / "args.bin", weights_only=True) == {"optim": OptimizerNames("adamw_bf16_sr")}


def test_a_name_of_another_version_is_named():
    with pytest.raises(
        ValueError, match=r"optim='adamx_bf16_sr' is not known to hf_lowprec .*version that it was saved"
    ):
        hf_lowprec.unpickle_optimizer_name("adamx_bf16_sr")
