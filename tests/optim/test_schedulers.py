"""Training loops of torch: every scheduler on every algorithm, and steps under `torch.compile`."""

import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from hf_lowprec.optim import SGD, Adam, AdamW
from tests.support.optim.every_optimizer import (
    FP32,
    OPTIONS,
    build,
    every_algorithm,
    parameters,
    train,
)

STEPS = 12
MAKERS = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 0.5**step),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.75),
    "StepLR": lambda o: schedules.StepLR(o, step_size=3),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, milestones=[2, 5], gamma=0.5),
    "ConstantLR": lambda o: schedules.ConstantLR(o, factor=0.25, total_iters=4),
    "LinearLR": lambda o: schedules.LinearLR(o, start_factor=0.125, total_iters=8),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, total_iters=10, power=2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, T_max=STEPS),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="triangular2"),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1, three_phase=True),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, factor=0.5, total_iters=3), schedules.ExponentialLR(o, gamma=0.9)]
    ),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=3), schedules.CosineAnnealingLR(o, T_max=9)], milestones=[4]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=5),
}
every_schedule = pytest.mark.parametrize("schedule", MAKERS)
WRITTEN = ("lr", "betas", "momentum", "base_momentum")


def advance(scheduler, step: int) -> None:
    """A metric that falls for three steps and then does not, for the one that asks."""
    if isinstance(scheduler, schedules.ReduceLROnPlateau):
        scheduler.step(max(3 - step, 0))
    else:
        scheduler.step()


def values(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Numbers that a scheduler may write, of every group; a tensor's at this moment."""
    groups = [{key: group[key] for key in WRITTEN if key in group} for group in optimizer.param_groups]
    return [{key: float(v) if isinstance(v, torch.Tensor) else v for key, v in group.items()} for group in groups]


def test_no_scheduler_of_torch_is_left_out():
    known = {
        name
        for name, cls in vars(schedules).items()
        if inspect.isclass(cls) and issubclass(cls, schedules.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} == MAKERS.keys() - {"SWALR"}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@every_schedule
@pytest.mark.parametrize(
    ("ours", "theirs"), [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam), (SGD, torch.optim.SGD)]
)
def test_rates_momenta_and_weights_are_torchs(ours, theirs, schedule, tensor):
    """The first are the same numbers, also where the learning rate is a tensor; FP32 weights are within rounding."""
    momentum = {"momentum": 0.9} if ours is SGD else {}
    both = []
    for cls in (ours, theirs):
        params = parameters(FP32)
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": torch.tensor(0.05) if tensor else 0.05}]
        optimizer = cls(groups, lr=torch.tensor(0.1) if tensor else 0.1, **momentum)
        both.append((optimizer, MAKERS[schedule](optimizer), params))
    for step in range(STEPS):
        for optimizer, scheduler, params in both:
            train(optimizer, params, [step])
            advance(scheduler, step)
        assert values(both[0][0]) == values(both[1][0])
        assert both[0][1].get_last_lr() == both[1][1].get_last_lr()
    for first, second in zip(both[0][2], both[1][2], strict=True):
        # 12 steps of at most 0.1 · 10 (momentum), some twenty FP32 roundings each: 12 · 20 · 2**-24 = 1.5e-5.
        assert (first - second).abs().max() <= 1.5e-5


@every_algorithm
def test_a_scheduler_may_begin_where_a_loaded_optimizer_is(name):
    """`last_epoch=` reads `initial_lr`, which only the loaded groups have."""
    params = parameters()
    optimizer = build(name, params, lr=0.1, **OPTIONS[name][0])
    scheduler = schedules.StepLR(optimizer, step_size=3)
    for step in range(5):
        train(optimizer, params, [step])
        scheduler.step()
    twins = parameters()
    twin = build(name, twins, lr=0.7, **OPTIONS[name][0])
    twin.load_state_dict(optimizer.state_dict())
    resumed = schedules.StepLR(twin, step_size=3, last_epoch=scheduler.last_epoch - 1)
    train(twin, twins, [5])
    for by in (scheduler, resumed):
        by.step()
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def training(compiled: bool, with_closure: bool = False, **arguments):
    """A function that takes one training step, its model and optimizer, and a list of the graphs that were compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).bfloat16()
    optimizer = AdamW(model.parameters(), lr=0.01, **arguments)
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    def loss_of(inputs):
        return model(inputs).float().pow(2).mean()

    if with_closure and compiled:
        loss_of = torch.compile(loss_of, backend=count)

    def take_step(inputs):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(inputs)
            loss.backward()
            return loss

        if with_closure:
            return optimizer.step(closure)
        loss = closure()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        return loss

    if compiled and not with_closure:
        take_step = torch.compile(take_step, backend=count)
    return take_step, model, optimizer, graphs


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_compiled_training_step_gives_the_same_bits_and_compiles_once(backend, with_closure):
    """… while the learning rate changes, which torch's optimizers compile as a constant."""
    torch.compiler.reset()
    runs = [training(compiled, with_closure, backend=backend) for compiled in (False, True)]
    counts = []
    for step in range(4):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        losses = []
        for take_step, _, optimizer, _ in runs:
            losses.append(take_step(inputs))
            optimizer.param_groups[0]["lr"] *= 0.5
        assert torch.equal(*losses)
        counts.append(len(runs[1][3]))
    assert counts[0] > 0 and counts[1:] == [counts[1]] * 3
    for params in zip(*(model.parameters() for _, model, _, _ in runs), strict=True):
        assert torch.equal(*params)
