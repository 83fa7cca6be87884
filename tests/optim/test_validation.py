"""What the optimizers refuse beside numbers out of range: words, near misses, compilers."""

import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, AdamW, native
from hf_lowprec.optim.c_compiler import CompilerError, require_compiler


def bf16(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(count, dtype=torch.bfloat16))]


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (AdamW, {"amsgrad": "yes"}, "amsgrad='yes' in param group 0 is not True or False"),
        (AdamW, {"maximize": 3}, "maximize=3 in param group 0 is not True or False"),
        (SGD, {"nesterov": "False", "momentum": 0.9}, "nesterov='False' in param group 0 is not True or False"),
        (AdamW, {"lr": float("inf")}, "lr=inf is invalid; it must be a finite number >= 0"),
        (AdamW, {"eps": None}, "eps=None is invalid"),
        (AdamW, {"seed": 1.5}, "seed=1.5 in param group 0 is not an integer"),
        (SGD, {"dampening": float("nan")}, "dampening=nan is invalid"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(bf16(), **arguments)


def test_a_misspelt_group_key_is_named_and_foreign_keys_are_kept():
    with pytest.raises(ValueError, match="'roundin' in param group 0 is not an argument of AdamW; is it 'rounding'"):
        AdamW([{"params": bf16(), "roundin": "nearest"}])
    optimizer = AdamW([{"params": bf16(), "name": "decoder", "initial_lr": 1e-3}])
    assert optimizer.param_groups[0]["name"] == "decoder"


def test_a_compiler_given_by_name_is_taken_at_its_word(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(CompilerError, match=r"\$CC='no-such-compiler -O2' is not a program.*backend='eager'"):
        AdamW(bf16(), backend="native")


def test_a_compiler_may_have_arguments(monkeypatch, tmp_path):
    path = require_compiler()[0]
    monkeypatch.setenv("CC", f"{path} -DNOTHING")
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path))
    native._load.cache_clear()
    params = bf16(5)
    params[0].grad = torch.ones_like(params[0])
    AdamW(params, backend="native").step()
    assert len(list(tmp_path.glob("*.so"))) == 1
    native._load.cache_clear()


def test_a_library_that_cannot_be_loaded_is_explained(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo not a library > $2')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path / "cache"))
    native._load.cache_clear()
    params = bf16(5)
    params[0].grad = torch.ones_like(params[0])
    optimizer = AdamW(params, backend="native")
    with pytest.raises(CompilerError, match=r"cannot be written or loaded .*HF_LOWPREC_CACHE"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones_like(params[0]))
    assert optimizer.state[params[0]]["step"] == 0
    native._load.cache_clear()
