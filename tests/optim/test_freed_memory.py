"""Tensors whose storage was freed are an error; in a process of their own, which a mistake would end."""

import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW, validation
from hf_lowprec.optim.step import param_entry
from tests.support.processes import forkserver

SCRIPT = """
import itertools
import torch
from torch import nn
from hf_lowprec.optim import AdamW

VICTIMS = ("the parameter itself", "its gradient", "its gradient, in a bucket", "exp_avg", "compensation")
cases = itertools.product(("eager", "native"), VICTIMS, (0, 2), ({}, {"max_grad_norm": 1.0}))
for backend, victim, steps, options in cases:
    named = [(name, nn.Parameter(torch.ones(40).bfloat16())) for name in ("a.weight", "b.weight", "c.weight")]
    optimizer = AdamW([{"params": named[:1]}, {"params": named[1:]}], backend=backend, **options)
    params = [param for _, param in named]
    bucket = torch.ones(600).bfloat16()
    for k in range(steps + 1):
        for number, param in enumerate(params):
            param.grad = bucket[200 * number :][:40] if "bucket" in victim else torch.ones(40).bfloat16()
        if k < steps:
            optimizer.step()
    if victim in optimizer.state[params[2]]:
        freed = optimizer.state[params[2]][victim]
    elif "gradient" in victim:
        freed = params[2].grad
    elif victim == "the parameter itself":
        freed = params[2]
    else:
        continue  # no state before the first step
    before = params[0].detach().clone()
    freed.untyped_storage().resize_(0)
    reads_it = "gradient" in victim or not steps  # the norm looks at weights and states only before the first step
    for what in (optimizer.step, *([optimizer.global_grad_norm] if reads_it else [])):
        try:
            what()
        except RuntimeError as error:
            words = victim.split(",")[0]
            number = 0 if "bucket" in victim else 2
            name = "abc"[number]
            assert f"parameter {number} ({name}.weight)" in str(error) and words in str(error), str(error)
            assert "was freed" in str(error)
        else:
            raise AssertionError((backend, victim, steps, what))
    assert reads_it or optimizer.global_grad_norm() == torch.tensor(120.0).sqrt()
    assert torch.equal(params[0], before)
    assert not steps or all(optimizer.state[param]["step"] == steps for param in params)
print("all refused")
"""


def test_freed_memory_is_refused_with_the_parameters_name(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = forkserver.run(script, [], timeout=280)
    assert (done.returncode, done.stdout) == (0, "all refused\n"), done.stderr


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_empty_tensors_and_memory_that_came_back_are_stepped(backend):
    params = [nn.Parameter(torch.ones(size).bfloat16()) for size in (0, 8)]
    optimizer = AdamW(params, lr=0.5, backend=backend)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    kept = params[1].detach().clone()
    size = params[1].untyped_storage().nbytes()
    params[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"parameter 1 cannot be stepped: the memory of the parameter itself"):
        optimizer.step()
    params[1].untyped_storage().resize_(size)
    params[1].data.copy_(kept)
    optimizer.step()
    assert torch.isfinite(params[1]).all() and not torch.equal(params[1], kept)
    assert optimizer.state[params[1]]["step"] == 3


def test_an_empty_gradient_costs_no_check_of_all_the_others(monkeypatch):
    """Shards of FSDP2 are often empty, and their address is 0."""
    params = [nn.Parameter(torch.ones(size).bfloat16()) for size in (0, 8)]
    optimizer = AdamW(params)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        monkeypatch.setattr(validation, "check_memory", lambda *_: pytest.fail("checked on a standing plan"))


def test_low_addresses_are_ordinary(monkeypatch):
    monkeypatch.setattr(param_entry, "_LOW", 1 << 63)
    test_an_empty_gradient_costs_no_check_of_all_the_others(monkeypatch)
