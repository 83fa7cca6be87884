"""NaN or infinity in one gradient element of one rank: it reaches every rank, and every rank skips the step."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

import hf_lowprec
from hf_lowprec.reduction import check_replicas
from tests.support.chosen_cases import one_in_turn
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import on_ranks
from tests.support.processes.shards import digest, gathered, local, of_every_rank
from tests.support.training.tiny_trainer import llama, optimizer_of

STEP, STEPS, MICRO_BATCHES = 2, 3, 2
PLACES = {"model.layers.0.mlp.down_proj": (1, (3, 5)), "model.norm": (0, (7,))}
"""Which rank, and the first element: of a BF16 weight and of an FP32 one, which are reduced separately."""
VALUES = {
    "NaN": 0x7FC0,
    "NaN, all bits set": 0xFFFF,  # adding to the bits, as some rounding does, would give zero
    "signaling NaN": 0x7F81,  # cutting bits off could leave infinity
    "infinity": 0x7F80,
    "minus infinity": 0xFF80,
}


def bf16(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.uint16).view(torch.bfloat16)[0]


Values = dict[tuple[int, ...], torch.Tensor]
"""Values by element of a gradient."""


def plant(model: nn.Module, place: str, values: Values) -> None:
    """Let the first micro-batch of step `STEP` give `values` to elements of the gradient on the place's rank."""
    rank, _ = PLACES[place]
    passes = 0

    def before(module: nn.Module, inputs: tuple) -> None:
        nonlocal passes
        passes += 1
        if passes == (STEP - 1) * MICRO_BATCHES + 1 and dist.get_rank() == rank:

            def damage(gradient: torch.Tensor) -> torch.Tensor:
                handle.remove()
                damaged = gradient.clone()
                for element, value in values.items():
                    damaged[element] = value
                return damaged

            # Here, because under FSDP2 the parameter that autograd sees is there during the passes only.
            handle = module.weight.register_hook(damage)

    model.get_submodule(place).register_forward_pre_hook(before)


class Run:
    """A model in training through `prepare_accelerator`."""

    def __init__(self, sharded: bool, accumulation: str, damage: dict[str, Values], **options: object) -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=MICRO_BATCHES,
            **({"fsdp_plugin": plugin} if sharded else {}),
        )
        model = llama()
        hf_lowprec.cast_model(model)
        for place, values in damage.items():
            plant(model, place, values)
        hf_lowprec.prepare_accelerator(self.accelerator, accumulation)
        optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-2, rounding="stochastic", **options)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.low = optimizer_of(self)

    def backward(self, step: int) -> None:
        """All micro-batches of a step, which are other ones on each rank."""
        for number in range(MICRO_BATCHES):
            seed = 1000 * step + 10 * number + dist.get_rank()
            rows = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(input_ids=rows, labels=rows).loss)
        assert self.accelerator.sync_gradients

    def step(self, clip: bool) -> None:
        if clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        named = self.accelerator.unwrap_model(self.model).named_parameters()
        return {name: gathered(param.grad) for name, param in named}

    def bits(self, of: Callable = local) -> str:
        """A digest of weights and states: of this rank's, or of whole ones."""
        return digest(self.model.parameters(), self.low, of)


def everywhere(value: object) -> object:
    """`value`, which all ranks must agree on."""
    assert all(other == value for other in of_every_rank(value)), value
    return value


def cases(number: int, modes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every place in each of several modes, and every value in one: they decide nothing together once they arrived."""
    count = -(-len(VALUES) // modes)
    values = itertools.islice(itertools.cycle(VALUES.values()), number * count, (number + 1) * count)
    return zip(itertools.cycle(PLACES), map(bf16, values), strict=False)


def check_without_skipping(sharded: bool, accumulation: str) -> None:
    """Planted values, and no others, arrive in the gradients of every rank: each value in each place."""
    planted: dict[str, Values] = {}
    for place, (_, (*row, column)) in PLACES.items():
        planted[place] = {(*row, column + number): bf16(bits) for number, bits in enumerate(VALUES.values())}
    run = Run(sharded, accumulation, planted)
    for step in range(1, STEP):
        run.backward(step)
        assert all(gradient.isfinite().all() for gradient in run.gradients().values())
        run.step(clip=False)
    run.backward(STEP)
    for key, gradient in run.gradients().items():
        values = planted.get(key.removesuffix(".weight"), {})
        bad = gradient.isfinite().logical_not().nonzero().tolist()
        assert bad == [list(element) for element in values], (accumulation, key, bad)
        for element, value in values.items():
            arrived = gradient[element]
            assert arrived.isnan() if value.isnan() else arrived == value, (accumulation, key, element, arrived)


def check_skipping(sharded: bool, accumulation: str, damages: Sequence[tuple[str, torch.Tensor]], clip: bool) -> None:
    """The step leaves no trace, nor do its sums over micro-batches: all is as if its batch had never been."""
    without = Run(sharded, accumulation, {}, skip_nonfinite=True)
    for step in range(1, STEPS + 1):
        if step != STEP:
            without.backward(step)
            without.step(clip)
    assert without.low.skipped_steps == 0
    expected = everywhere(without.bits(gathered))
    for place, value in damages:
        case = accumulation, place, value
        damage = {place: {PLACES[place][1]: value}}
        run = Run(sharded, accumulation, damage, skip_nonfinite=True)
        for step in range(1, STEPS + 1):
            run.backward(step)
            before = run.bits() if step > 1 else None  # there are no states before the first step
            run.step(clip)
            assert everywhere(run.bits() == before) == (step == STEP), (case, step)
            assert everywhere(run.low.skipped_steps) == int(step >= STEP), (case, step)
        assert run.bits(gathered) == expected, case
        assert all(gathered(param).isfinite().all() for param in run.model.parameters())
        check_replicas(run.model, run.optimizer)


def check_after_reduction(sharded: bool, clip: bool) -> None:
    """NaN in a reduced gradient of rank 1: ranks with shards agree; replicas do not, which `check_replicas` sees."""
    run = Run(sharded, "nearest", {}, skip_nonfinite=True)
    for step in range(1, STEPS + 1):
        run.backward(step)
        if step == STEP and dist.get_rank() == 1:
            local(next(run.model.parameters()).grad).view(-1)[0] = torch.nan
        run.step(clip)
    assert of_every_rank(run.low.skipped_steps) == ([1, 1] if sharded else [0, 1])
    with nullcontext() if sharded else pytest.raises(RuntimeError, match="replicas differ"):
        check_replicas(run.model, run.optimizer)


def check(kind: str) -> None:
    sharded = kind == "fsdp2"
    if sharded:
        allow_fsdp_on_cpu()
    modes = ("nearest", "fp32")
    for number, accumulation in enumerate(modes):
        check_without_skipping(sharded, accumulation)
        damages = one_in_turn([*cases(number, len(modes))], number)
        check_skipping(sharded, accumulation, damages, clip=accumulation != "nearest")
    for clip in one_in_turn((True, False), 0):
        check_after_reduction(sharded, clip)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.every_case), "fsdp2"])
def test_one_rank_is_not_finite(kind):
    on_ranks(check, 2, kind)
