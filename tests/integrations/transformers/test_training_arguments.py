"""The names of `--optim`, on the command line, in pickles and in copies; and the fields that reach an optimizer."""

import copy
import pickle

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_lowprec
from hf_lowprec.integrations.transformers.training_arguments import checked_arguments, optimizer_arguments
from tests.support.processes import forkserver
from tests.support.training.tiny_trainer import arguments


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
        ({"optim_args": "betas=0.9|0.9|fast"}, r"betas\[2\]='fast' is invalid; it must be a number"),
        ({"optim_args": "betas=0.9|0.9|1"}, r"betas\[2\]=1.0 is invalid; it must be a number >= 0 and < 1"),
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
