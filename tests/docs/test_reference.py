"""The reference names every argument that there is, with the default that it has."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

import hf_lowprec
from hf_lowprec.optim import arguments

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
ALGORITHMS = {name.partition("_")[0] for name in hf_lowprec.OPTIMIZER_NAMES}
ENTRY = re.compile(r"^- \*\*`?(\w+)`?\*\*(.*(?:\n  .*)*)", re.MULTILINE)
CALLBACK = inspect.signature(hf_lowprec.LowPrecisionCallback).parameters


def entries(page: str, heading: str) -> dict[str, str]:
    """The items of the list under a heading, by the name that each begins with."""
    text = (REFERENCE / page).read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return dict(ENTRY.findall(text))


SHARED = entries("optim-args.md", "Keys of every optimizer")
OWN = {
    name.lower(): dict(pair.split("=") for pair in re.findall(r"`([^`]+)`", text))
    for name, text in entries("optim-args.md", "Keys of an algorithm").items()
}


def defaults(algorithm: str) -> dict[str, Any]:
    """The keyword arguments of an `optim=` name, with their defaults."""
    cls, given = hf_lowprec.optimizer_factory(f"{algorithm}_bf16_kahan")
    return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()} | given


def parsed(algorithm: str, option: str) -> dict[str, Any]:
    """The optimizer's arguments that `optim_args` of one pair gives under Trainer."""
    name = f"{algorithm}_bf16_kahan"
    return Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(optim=name, optim_args=option))[1]


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_key_of_optim_args_is_listed(algorithm: str) -> None:
    with pytest.raises(ValueError, match="valid are") as error:
        parsed(algorithm, "no_such_key=1")
    valid = set(str(error.value).rpartition("valid are ")[2].split(", "))
    assert valid == {*SHARED, *OWN[algorithm]}


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_the_defaults_of_an_algorithm_are_those_of_its_name(algorithm: str) -> None:
    for key, value in OWN[algorithm].items():
        assert parsed(algorithm, f"{key}={value}")[key] == defaults(algorithm)[key], key


def test_the_defaults_of_shared_keys_are_those_of_the_code() -> None:
    stated = {key: found[1] for key, text in SHARED.items() if (found := re.search(r"default: `(\w+)`\)", text))}
    assert len(stated) > 5
    for key, value in stated.items():
        if key in CALLBACK:
            assert value == str(CALLBACK[key].default), key
        else:
            assert parsed("adamw", f"{key}={value}")[key] == defaults("adamw")[key], key


def test_the_examples_parse() -> None:
    for key, text in SHARED.items():
        examples = re.findall(rf"`({key}=[^`]+)`", text)
        assert examples, key
        for example in examples:
            assert key in CALLBACK or key in parsed("adamw", example)


def test_the_arguments_of_every_optimizer_are_those_of_the_table() -> None:
    listed = entries("optimizers.md", "Arguments of every optimizer")
    stated = {name: re.search(r"default: `([^`]+)`\)", text) for name, text in listed.items()}
    defaults = {name: argument.default for name, argument in arguments.SHARED.items()}
    assert {name: found and ast.literal_eval(found[1]) for name, found in stated.items()} == defaults
