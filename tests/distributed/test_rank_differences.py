"""Ranks whose settings or weights differ say so, all of them, before the first step; equal ones do not."""

import functools
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

import hf_lowprec
from tests.support.processes.fsdp_on_cpu import accelerator_arguments, allow_fsdp_on_cpu
from tests.support.processes.ranks import on_ranks, run_trainer

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def rank() -> int:
    return int(os.environ["RANK"])


def odd() -> bool:
    """Whether this is the rank that differs."""
    return rank() == 1


def kind() -> str:
    """What distributes the model: ddp, fsdp2 or hsdp."""
    return os.environ["KIND"]


class Net(nn.Module):
    """A layer, norms with and without buffers, and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.LayerNorm(width)
        self.batch, self.head = nn.BatchNorm1d(width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.batch(self.norm(self.first(x))))


def accelerator(cpu_ram_efficient_loading: bool = False, **settings: Any) -> Accelerator:
    efficient = {"cpu_ram_efficient_loading": cpu_ram_efficient_loading}
    return Accelerator(cpu=True, **accelerator_arguments(kind(), auto_wrap_policy="no_wrap", **efficient), **settings)


def groups(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    """Two groups, the second with settings of its own."""
    first = [param for name, param in model.named_parameters() if "head" not in name]
    return [{"params": first}, {"params": list(model.head.parameters()), **second}]


def train(
    setup: Callable[[], Accelerator] = accelerator,
    prepare: dict[str, Any] | None = None,
    cast: dict[str, Any] | None = None,
    build: Callable[[], nn.Module] = Net,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: hf_lowprec.AdamW(groups(model), lr=0.1),
    change: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
    clip: float | None = None,
    steps: int = 1,
) -> None:
    """Steps on data of this rank's own."""
    made = setup()
    hf_lowprec.prepare_accelerator(made, **(prepare or {}))
    torch.manual_seed(0)
    model = build()
    hf_lowprec.cast_model(model, **(cast or {}))
    model, chosen = made.prepare(model, optimizer(model))
    change(model, chosen.optimizer)
    for step in range(steps):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank()))
        made.backward(model(inputs).float().square().sum())
        if clip is not None:
            made.clip_grad_norm_(model.parameters(), clip)
        chosen.step()
        chosen.zero_grad()


def adamw(**settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: hf_lowprec.AdamW(groups(model), lr=0.1, **settings)


def second(**settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: hf_lowprec.AdamW(groups(model, **settings), lr=0.1)


def reversed_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second = groups(model)
    return hf_lowprec.AdamW([first, {"params": second["params"][::-1]}], lr=0.1)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return hf_lowprec.AdamW(model.parameters(), lr=0.1)


def freeze(part: str, model: nn.Module) -> nn.Module:
    getattr(model, "module", model).get_submodule(part).requires_grad_(False)
    return model


def another_net() -> nn.Module:
    """One of each rank's own; without buffers, which accelerate does not load efficiently."""
    torch.manual_seed(rank())
    model = Net()
    model.batch = nn.Identity()
    return model


def another_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        getattr(model, "module", model).norm.bias.add_(1)


def another_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change a state on one rank, as resuming from another checkpoint would."""
    train_once(model, optimizer)
    average = optimizer.state[optimizer.param_groups[1]["params"][1]]["exp_avg"]
    if odd():
        average.add_(1)


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make states, as resuming does, before the first step that accelerate takes."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.plan_step().release()
    optimizer.zero_grad()


BF16, FP32 = torch.bfloat16, torch.float32
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # What ranks have, what rank 1 has instead, and what all say.
    "seed": ({}, {"optimizer": second(seed=1)}, "param_groups[1]['seed'] is 1 on rank 1 and 0 on rank 0"),
    "learning rate on the device": (
        {},
        {"optimizer": second(lr=torch.tensor(0.25))},
        "param_groups[1]['lr'] is 0.25 on rank 1 and 0.1 on rank 0",
    ),
    "betas": (
        {},
        {"optimizer": second(betas=(0.8, 0.9))},
        "param_groups[1]['betas'] is [0.8, 0.9] on rank 1 and [0.9, 0.999] on rank 0",
    ),
    "state_dtype": (
        {"optimizer": adamw(state_dtype={"exp_avg": BF16, "exp_avg_sq": FP32})},
        {"optimizer": adamw(state_dtype=FP32)},
        "param_groups[0]['state_dtype'] is 'torch.float32' on rank 1 and "
        "{'exp_avg': 'torch.bfloat16', 'exp_avg_sq': 'torch.float32'} on rank 0",
    ),
    "class": (
        {},
        {"optimizer": lambda model: hf_lowprec.Lion(groups(model), lr=0.1)},
        "the optimizer is 'hf_lowprec.optim.algorithms.lion.Lion' on rank 1 and "
        "'hf_lowprec.optim.algorithms.adamw.AdamW' on rank 0",
    ),
    "order in the optimizer": (
        {},
        {"optimizer": reversed_groups},
        "param_groups[1]['params'][0] is 'head.bias: bfloat16 (2,)' on rank 1 and "
        "'head.weight: bfloat16 (2, 8)' on rank 0",
    ),
    "groups": ({}, {"optimizer": one_group}, "the number of param_groups is 1 on rank 1 and 2 on rank 0"),
    "max_grad_norm": ({}, {"optimizer": adamw(max_grad_norm=1.0)}, "max_grad_norm is 1.0 on rank 1 and None on rank 0"),
    "clipping": ({"clip": 1.0}, {"clip": 2.0}, "max_grad_norm is 2.0 on rank 1 and 1.0 on rank 0"),
    "no clipping": ({"clip": 1.0}, {"clip": None}, "max_grad_norm is None on rank 1 and 1.0 on rank 0"),
    "skip_nonfinite": ({}, {"optimizer": adamw(skip_nonfinite=True)}, "skip_nonfinite is True on rank 1 and False"),
    "accumulation": (
        {},
        {"prepare": {"grad_accumulation": "fp32"}},
        "grad_accumulation is 'fp32' on rank 1 and 'nearest' on rank 0",
    ),
    "micro-batches": (
        {},
        {"setup": lambda: accelerator(gradient_accumulation_steps=2)},
        "gradient_accumulation_steps is 2 on rank 1 and 1 on rank 0",
    ),
    "keep_fp32": (
        {},
        {"cast": {"keep_fp32": ["head"]}},
        "parameter 6 of Net is 'head.weight: float32 (2, 8)' on rank 1 and 'head.weight: bfloat16 (2, 8)' on rank 0",
    ),
    "shapes": (
        {},
        {"build": lambda: Net(6)},
        "parameter 0 of Net is 'first.weight: bfloat16 (6, 4)' on rank 1 and 'first.weight: bfloat16 (8, 4)' on rank 0",
    ),
    "frozen": (
        {},
        {"build": lambda: freeze("norm", Net())},
        "parameter 2 of Net is 'norm.weight: float32 (8,), frozen' on rank 1 and 'norm.weight: float32 (8,)' on rank 0",
    ),
    "late": ({}, {"change": lambda model, _: freeze("norm", model)}, "'norm.bias: float32 (8,), frozen' on rank 1 and"),
    "all frozen": ({}, {"build": lambda: freeze("", Net())}, "'first.weight: bfloat16 (8, 4), frozen' on rank 1 and"),
    "weights": (
        {},
        {"change": another_weight},
        "before the first step, replicas differ: norm.bias on rank 1 differs from that on rank 0 (1 of 8 tensors",
    ),
    "states": (
        {"change": another_state},
        {},
        "before the first step, replicas differ: head.bias (exp_avg) on rank 1 differs from that on rank 0 (1 of",
    ),
}
REPLICATED = ("weights", "states")
"""Cases for replicas only: shards need not have these in common."""


def complaint(act: Callable[[], None]) -> str:
    try:
        act()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def check_differences() -> None:
    for name, (common, other, expected) in DIFFERENT.items():
        found = complaint(functools.partial(train, **{**common, **(other if odd() else {})}))
        unseen = kind() == "fsdp2" and name in REPLICATED
        assert (not found) if unseen else expected in found, (rank(), name, found)


def check_many_differences() -> None:
    """Three are named, and the others counted."""
    found = complaint(lambda: train(optimizer=adamw(betas=(0.5, 0.6), eps=1e-3, seed=5) if odd() else adamw()))
    assert len(re.findall(r"on rank 1 and", found)) == 3, found
    assert "; and 3 more. Replicas would diverge; use the same settings on every rank" in found, found


def check_equal_ones() -> None:
    """Ranks that differ where they may are not reported."""
    calls, gather = [], dist.all_gather_object
    dist.all_gather_object = lambda *args, **options: (calls.append(args), gather(*args, **options))

    def buffers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        getattr(model, "module", model).batch.running_mean.add_(rank())

    train(steps=3)
    once = len(calls)
    train(steps=1)
    assert len(calls) == 2 * once, "later steps compare nothing"
    train(optimizer=adamw(backend="eager" if odd() else "auto"), clip=1.0, steps=2)
    train(change=buffers)
    train(change=train_once)
    train(optimizer=lambda model: torch.optim.SGD(groups(model), lr=torch.tensor(0.25) if odd() else 0.25))
    train(optimizer=second(lr=1 if odd() else 1.0))
    train(optimizer=second(device=torch.device("cuda", rank())))
    efficient = {} if kind() == "ddp" else {"cpu_ram_efficient_loading": True}
    train(setup=lambda: accelerator(**efficient), build=another_net)  # both start from the weights of rank 0
    dist.all_gather_object = gather


def check_different_shards() -> None:
    """Each is a shard of another model: nothing parts, and it is said, once."""
    said = (
        TestCase().assertLogs("hf_lowprec", "WARNING")
        if rank() == 0
        else TestCase().assertNoLogs("hf_lowprec", "WARNING")
    )
    with said as heard:
        train(build=another_net)
    if rank() == 0:
        (message,) = heard.output
        assert "before sharding, replicas differ: first.weight on rank 1 differs from that on rank 0" in message
        assert "cpu_ram_efficient_loading" in message


def check_modules_that_fsdp2_ignores() -> None:
    """Each rank has its own, before sharding and at the first step."""

    def build() -> nn.Module:
        model = Net()
        with torch.no_grad():
            model.head.weight.fill_(rank())
        return model

    def setup() -> Accelerator:
        made = accelerator()
        made.state.fsdp_plugin.ignored_modules = "head"
        return made

    train(setup=setup, build=build)


def check_weights_on_the_meta_device() -> None:
    """They are loaded after sharding: on all ranks, or from rank 0 on the others; so there is nothing to say."""
    for device in ("meta", "meta" if odd() else "cpu"):
        made = accelerator()
        hf_lowprec.prepare_accelerator(made)
        with torch.device(device):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
        model, _ = made.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(isinstance(param, DTensor) for param in model.parameters())


def check_replicas_of_shards() -> None:
    """Ranks 0 and 2 hold the same, and 1 and 3; what 1 and 3 find is told on 0 and 2 as well."""
    found = complaint(lambda: train(change=another_weight if odd() else lambda model, optimizer: None))
    assert "before the first step, replicas differ: norm.bias on rank 3 differs from that on rank 1" in found, found
    train(steps=2)


def check_prepared_before() -> None:
    """`prepare_accelerator` on an accelerator that has prepared models before."""
    too_late = "call prepare_accelerator before accelerator.prepare"

    def refusal(built: Accelerator) -> str:
        return complaint(lambda: hf_lowprec.prepare_accelerator(built))

    built, model = accelerator(), nn.Linear(4, 4).bfloat16()
    assert built.prepare_model(model, evaluation_mode=True) is model and model.weight.requires_grad
    assert not refusal(built), "what is only evaluated has no gradients to sum"
    built = accelerator()
    model = nn.Linear(4, 4).bfloat16()
    prepared = built.prepare(model, adamw_of(model))
    assert too_late in refusal(built), prepared
    if kind() == "ddp":
        built, model = accelerator(), nn.Linear(4, 4).bfloat16()
        prepared = built.prepare(model)  # its optimizer follows later
        assert too_late in refusal(built), prepared
        built, model = accelerator(), nn.Linear(4, 4).bfloat16()
        optimizer = built.prepare(adamw_of(model))
        assert not refusal(built)
        built.prepare(model)(torch.ones(1, 4, dtype=BF16)).sum().backward()
        assert "lr" in complaint(optimizer.step), "ranks with different learning rates were not compared"


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    """One with another learning rate on every rank."""
    return hf_lowprec.AdamW(model.parameters(), lr=0.1 * (1 + rank()))


CHECKS = {
    "ddp": [check_differences, check_many_differences, check_equal_ones, check_prepared_before],
    "hsdp": [check_replicas_of_shards],
}
SILENT = [check_equal_ones, check_modules_that_fsdp2_ignores, check_weights_on_the_meta_device]
CHECKS["fsdp2"] = [*CHECKS["ddp"], check_different_shards, *SILENT[1:]]


def check() -> None:
    allow_fsdp_on_cpu()
    for each in CHECKS[kind()]:
        with TestCase().assertNoLogs("hf_lowprec", "WARNING") if each in SILENT else nullcontext():
            each()


@pytest.mark.parametrize(
    ("kind", "ranks"), [pytest.param("ddp", 2, marks=pytest.mark.every_case), ("fsdp2", 2), ("hsdp", 4)]
)
def test_what_differs_is_told_on_every_rank_before_the_first_step(kind, ranks):
    """Ranks whose devices, buffers, backends or data differ get no error; replicas of shards are compared as well."""
    on_ranks(check, ranks, KIND=kind)


def test_an_accelerator_that_has_prepared_a_model_for_training_is_refused():
    """For FSDP2 as well, but that is seen above."""
    on_ranks(check_prepared_before, 2, KIND="ddp")


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.every_case)])
def test_trainers_that_differ_tell(kind):
    words = "--optim adamw_bf16_sr --save_strategy no --max_steps 2"
    printed = run_trainer(2, kind, None, words, fails=True, SEED_OF_RANK_1="5").report
    assert printed.count("param_groups[0]['seed'] is 5 on rank 1 and 42 on rank 0; param_groups[1]['seed'] is 5") == 2
    assert "rank 0 of 2 failed" in printed and "rank 1 of 2 failed" in printed
