"""The optimizer that `TrainingArguments` select: the names of `--optim`, the fields, and `optim_args`.

`checkpoints/test_optimizer_state.py` trains and resumes with the schedules of `optim_args`.
"""

import copy
import pickle

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_lowprec
from hf_lowprec.integrations.transformers import optim_args
from hf_lowprec.integrations.transformers.optim_args import RoundingSchedule, optim_args_of
from hf_lowprec.integrations.transformers.training_arguments import checked_arguments, optimizer_arguments
from tests.support.processes import forkserver
from tests.support.training.tiny_trainer import arguments, llama, trained


def test_names_on_the_command_line():
    parser = HfArgumentParser(TrainingArguments)
    for name in hf_lowprec.OPTIMIZER_NAMES:
        (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--optim", name])
        assert args.optim == name
    with pytest.raises((SystemExit, ValueError)):
        parser.parse_args_into_dataclasses(["--output_dir", "out", "--optim", "adamw_bf16_kahn"])


@pytest.mark.parametrize("name", hf_lowprec.OPTIMIZER_NAMES)
def test_untouched_fields_leave_every_algorithm_its_own_defaults(tmp_path, name):
    args = arguments(tmp_path, optim=name, seed=7, learning_rate=2e-3)
    cls, given = optimizer_arguments(args)
    algorithm, mode = name.split("_bf16_")
    assert given == {**cls.named_defaults, "rounding": {"sr": "stochastic"}.get(mode, mode), "lr": 2e-3, "seed": 7}
    assert checked_arguments(args) == given
    assert cls.__name__.lower() == algorithm


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
        (
            {"adam_beta2": 0.95},
            r"adam_beta2 cannot be used with optim='adan_bf16_sr'.*3 betas.*'betas=0.98\|0.92\|0.99'",
        ),
        ({"optim_args": "betas=0.9|0.99"}, r"betas=\(0.9, 0.99\) .* must be 3 numbers, as \(0.98, 0.92, 0.99\)"),
    ],
)
def test_three_betas_are_not_two(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        checked_arguments(arguments(tmp_path, optim="adan_bf16_sr", **settings))


def test_a_factory_names_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"'adamw_bf16_kahn' is unknown \(did you mean 'adamw_bf16_kahan'\?\)"):
        hf_lowprec.optimizer_factory("adamw_bf16_kahn")
    with pytest.raises(ValueError, match="'sed' is not an argument"):
        hf_lowprec.optimizer_factory("adamw_bf16_sr", sed=1)


def test_saved_arguments_are_read_without_this_package(tmp_path):
    """`training_args.bin`, which Trainer saves with every model."""
    saved = [arguments(tmp_path, optim=name) for name in hf_lowprec.OPTIMIZER_NAMES]
    torch.save(saved, tmp_path / "training_args.bin")
    found = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert found == saved
    assert all(Trainer.get_optimizer_cls_and_kwargs(args)[0].__module__.startswith("hf_lowprec.") for args in found)
    (tmp_path / "load.py").write_text(f"""
import sys, torch
sys.modules["hf_lowprec"] = None  # as if it were not installed
found = torch.load({str(tmp_path / "training_args.bin")!r}, weights_only=False)
print(*(args.optim for args in found))
""")
    result = forkserver.run(tmp_path / "load.py", [], timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == list(hf_lowprec.OPTIMIZER_NAMES)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_names_stay_equal_through_pickles_and_copies(protocol):
    for name in hf_lowprec.OPTIMIZER_NAMES:
        member = OptimizerNames(name)
        assert pickle.loads(pickle.dumps(member, protocol)) == member == name
        assert copy.deepcopy(member) == copy.copy(member) == member
    stock = OptimizerNames.ADAMW_TORCH
    assert pickle.loads(pickle.dumps(stock, protocol)) is stock


def test_names_load_where_only_listed_types_do(tmp_path):
    torch.save({"optim": OptimizerNames("adamw_bf16_sr")}, tmp_path / "args.bin")
    assert torch.load(tmp_path / "args.bin", weights_only=True) == {"optim": OptimizerNames("adamw_bf16_sr")}


def test_optim_args_are_parsed_once_for_a_run(tmp_path, monkeypatch):
    parsed, parse = [], optim_args.option_strings
    monkeypatch.setattr(optim_args, "option_strings", lambda text: (parsed.append(text), parse(text))[1])
    text = "seed=3,eps=1.0625e-7"  # in no other test, and none has parsed it before
    trained(tmp_path, optim="adamw_bf16_kahan", optim_args=text, max_steps=1)
    assert parsed == [text]


def test_optim_args_that_a_search_changes_are_parsed_again(tmp_path):
    """Trainer's hyperparameter search sets the arguments of a trial on the same object."""
    args = arguments(tmp_path, optim="adamw_bf16_kahan", optim_args="eps=1e-7")
    assert optimizer_arguments(args)[1]["eps"] == 1e-7
    args.optim_args, args.learning_rate = "eps=1e-6", 3e-4
    assert {key: optimizer_arguments(args)[1][key] for key in ("eps", "lr")} == {"eps": 1e-6, "lr": 3e-4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("momentun=0.9", r"'momentun' is not an argument of .*did you mean 'momentum'(?!.*\brounding,.*\brounding\b)"),
        (
            "fused=True",
            r"'fused' is not an argument of optim_args for optim=.*: every backend is fused, so .* remove it",
        ),
        ("momentum", r"'momentum' is not of the form key=value \(pairs are separated by commas\)"),
        ("momentum=0.9,=3", r"'momentum=0.9,=3' is not of the form key=value \(pairs are separated by commas\)"),
        ("seed=1,seed=2", r"names 'seed' twice"),
        ("rounding=kahn", r"rounding='kahn'.*'kahan', 'split', 'stochastic', 'nearest'"),
        ("rounding=stochastic:0.5", r"rounding='stochastic:0.5' .*stochastic:0.8\|kahan"),
        ("rounding=stochastic:0.5|kahan:0.5", r"each but the last"),
        ("rounding=stochastic:0.5|nearest:0.5|kahan", r"must add up to less than 1"),
        ("rounding=stochastic:nan|kahan", r"cannot be parsed"),
        ("rounding=stochastic:0.5|", r"cannot be parsed"),
        ("check_replicas_every=often", r"check_replicas_every='often' in optim_args is not an integer"),
    ],
)
def test_bad_optim_args_name_what_is_wrong(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        optim_args_of(arguments(tmp_path, optim="sgd_bf16_kahan", optim_args=words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("momentum=0.9,0.95", r"momentum='0.9,0.95' is invalid; it must be a number"),
        ("seed=1,,momentum=0.9", r"seed='1,' in param group 0 is not an integer"),
        ("gradient_release=maybe", r"gradient_release='maybe' is not True or False"),
        ("reduction=ring", "reduction='ring' is unknown; valid are 'rank_order', 'nccl'"),
        ("check_replicas_every=-1", "check_replicas_every=-1 is negative"),
        ("momentun=0.9", "'momentun' is not an argument of"),
    ],
)
def test_bad_values_are_refused_before_the_model_is_cast(tmp_path, words, message):
    model = llama()
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, model, optim="sgd_bf16_kahan", optim_args=words)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("optim", "words", "with_bars"),
    [
        ("adamw_bf16_kahan", "eps=1e-6,betas=(0.9, 0.95),seed=3", "eps=1e-6,betas=0.9|0.95,seed=3"),
        ("adan_bf16_sr", "betas=0.98,0.92,0.99", "betas=0.98|0.92|0.99"),
        ("adamw_bf16_sr", "keep_fp32=['lm_head', 'layers.[01].mlp']", "keep_fp32=lm_head|layers.[01].mlp"),
        ("adamw_bf16_sr", "rounding=stochastic:0.5,kahan", "rounding=stochastic:0.5|kahan"),
        ("adamw_bf16_sr", "rounding = sr : 0.8 | kahan ", "rounding=stochastic:0.8|kahan"),
        ("adamw_bf16_sr", "state_dtype={'exp_avg': 'int8', 'exp_avg_sq': 'float32'}",
         "state_dtype=exp_avg:int8|exp_avg_sq:float32"),
    ],
)  # fmt: skip
def test_commas_and_spaces_separate_the_values_of_one_key_too(tmp_path, optim, words, with_bars):
    found, expected = (optim_args_of(arguments(tmp_path, optim=optim, optim_args=text)) for text in (words, with_bars))
    assert found == expected


@pytest.mark.parametrize(
    ("text", "max_steps", "expected"),
    [
        ("kahan", 3, "kkk"),
        ("stochastic:0.8|kahan", 10, "sssssssskk"),
        ("stochastic:0.5|kahan", 5, "sskkk"),
        ("nearest:0.25|stochastic:0.5|kahan", 8, "nnsssskk"),
        ("stochastic:0.1|kahan", 3, "kkk"),  # the share rounds to no step
        ("stochastic:0.999|kahan", 3, "sss"),
    ],
)
def test_phases(text, max_steps, expected):
    schedule = RoundingSchedule.parse(text)
    assert "".join(schedule.mode(step, max_steps)[0] for step in range(max_steps)) == expected
