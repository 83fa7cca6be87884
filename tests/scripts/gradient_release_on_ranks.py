"""Gradient release gives the bits of the ordinary step on several ranks, and frees gradients on the way.

gradient_release_on_ranks.py KIND[,…] ROUNDING[-int8][,…]   (as same_batches.py has them)

States may be on the host, too, and gradients, which are
accumulated and clipped there. For each kind and rounding, rank 0 prints the digests of an ordinary run and of
a released one, the largest share of the gradients that existed at once after the first step, and the norms by which
`clip="delayed"` clips.
"""

import sys
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist

from hf_lowprec.optim import host_steps
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.reduction import check_replicas
from tests.scripts.same_batches import build
from tests.scripts.trainer_ranks import digest, text
from tests.support.chosen_cases import one_in_turn
from tests.support.optim.simulated_copies import simulate_device
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import leave

STEPS = 3
gradient_buckets.BUCKET_ELEMENTS = host_steps.BUCKET_ELEMENTS = 4000  # of 44,000, or 93,000 with states in 8 bits


class MostAlive:
    """Counts the elements of gradients that exist when a bucket is about to be stepped; one of `before_part`."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params, self.most = params, 0

    def __call__(self, plan) -> None:
        self.most = max(self.most, sum(param.grad.numel() for param in self.params if param.grad is not None))


def train(
    kind: str, rounding: str, micro_batches: int = 1, synced: bool = False, **options
) -> tuple[str, float, list[float]]:
    accelerator, model, optimizer = build(kind, "full", rounding, **options)
    accelerator.gradient_accumulation_steps = micro_batches
    params = [param for group in optimizer.param_groups for param in group["params"]]
    everything, alive, norms = sum(map(torch.Tensor.numel, params)), MostAlive(params), []
    rows = text(64)
    for step in range(STEPS):
        if step == 1 and optimizer.optimizer.gradient_release:  # DDP chooses its buckets in the first step
            optimizer.optimizer.before_part.append(alive)
        for micro_batch in range(micro_batches):
            tokens = torch.stack([row["input_ids"] for row in rows[2 * step + micro_batch : 2 * step + 2]])
            with nullcontext() if synced else accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        if "max_grad_norm" in options:
            accelerator.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
        optimizer.step()
        if "max_grad_norm" in options:
            norms.append(float(optimizer.optimizer.grad_norm))
        optimizer.zero_grad()
    check_replicas(model, optimizer)
    return digest(model, optimizer.optimizer), alive.most / everything, norms


def main(kinds: str, roundings: str) -> None:
    allow_fsdp_on_cpu()
    for number, (kind, rounding) in enumerate(product(kinds.split(","), roundings.split(","))):
        ordinary, _, _ = train(kind, rounding)
        released, share, _ = train(kind, rounding, gradient_release=True)
        clipped = {"max_grad_norm": 0.25}
        synchronized = one_in_turn((False, True), number)
        accumulated = [train(kind, rounding, 2, synced, **clipped) for synced in synchronized]
        with pytest.MonkeyPatch.context() as patch:
            simulate_device(patch, seed=dist.get_rank())
            for options in one_in_turn(({"gradient_release": True}, {}), number):
                assert train(kind, rounding, offload_states=True, **options)[0] == ordinary, options
            for synced, expected in zip(synchronized, accumulated, strict=True):
                on_host = {"offload_states": True, "offload_gradients": True}
                found = train(kind, rounding, 2, synced, **clipped, **on_host)
                assert (found[0], found[2]) == (expected[0], expected[2]), synced
        _, _, norms = train(kind, rounding, gradient_release=True, clip="delayed", max_grad_norm=0.25)
        if dist.get_rank() == 0:
            print(kind, rounding, ordinary, released, f"{share:.3f}", *norms)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
