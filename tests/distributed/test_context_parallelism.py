"""Context parallelism through accelerate: FSDP2 sums gradients over all sequences and over their parts, in FP32.

There are two sequences on four ranks, each on two. torch's attention under context parallelism needs a GPU; one that
gathers keys and values takes its place.
"""

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface

import hf_lowprec
from hf_lowprec.integrations.accelerate import unsupported
from hf_lowprec.reduction import fsdp2
from tests.reduction.test_fsdp2 import BF16, FP32, Layers, compare, draw
from tests.reduction.test_refusals import OfSums, mean_of_rounded_sum
from tests.scripts.trainer_ranks import llama
from tests.support.processes.fsdp_on_cpu import accelerator_arguments, allow_fsdp_on_cpu
from tests.support.processes.ranks import on_ranks
from tests.support.reduction.numpy_reference import mean

SEQUENCE = 16


def context_parallel() -> Accelerator:
    return Accelerator(cpu=True, **accelerator_arguments("cp", cpu_ram_efficient_loading=False))


def check_sums(by: str, definition: Callable) -> str:
    """Every rank has other gradients; the sum is that over all ranks, in their order. Returns the report."""
    accelerator = context_parallel()
    status = hf_lowprec.prepare_accelerator(accelerator, reduction=by)
    model = Layers(BF16, FP32)
    model, _ = accelerator.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))
    gradients = draw(model, seed=0)
    model(torch.zeros((), requires_grad=True)).backward()
    compare(model, [definition(one) for one in gradients], f"context parallelism, {by}")
    assert "context parallelism over 2 ranks: gradients are summed over them as well" in str(status)
    return str(status)


def check_sums_by_nccl() -> None:
    """Where FSDP2 asks NCCL for them, a stand-in sums in FP32."""
    asked = []

    def in_symmetric_memory(module: FSDPModule) -> None:
        asked.append(module)
        module.set_custom_reduce_scatter(OfSums())

    unsupported.check_nccl = fsdp2.check_nccl = lambda device_type: None
    FSDPModule.set_symm_mem_for_comm = in_symmetric_memory
    assert "FSDP2: FP32 sums by NCCL over 4 ranks" in check_sums("nccl", mean_of_rounded_sum)
    assert asked


def attention(module, query, key, value, mask, scaling, positions, group=None, **_):
    """Causal attention to the keys of all ranks of `group`."""
    seen = positions
    if group is not None:
        key, value = (all_gather_single_autograd(one.contiguous(), 2, group) for one in (key, value))
        seen = all_gather_single_autograd(positions, 1, group)
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores.masked_fill(seen[:, None, None] > positions[:, None, :, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def loss(model, tokens, labels, positions, group=None) -> torch.Tensor:
    logits = model(input_ids=tokens, position_ids=positions, positions=positions, group=group).logits
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def check_a_split_sequence() -> None:
    """The gradients are those of one process for the mean loss of both sequences."""
    AttentionInterface.register("gathered", attention)
    rows = torch.randint(256, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    tokens, labels, positions = rows[:, :-1], rows[:, 1:], torch.arange(SEQUENCE).repeat(2, 1)
    alone, model = (llama(attn_implementation="gathered") for _ in range(2))
    loss(alone, tokens, labels, positions).backward()

    accelerator = context_parallel()
    hf_lowprec.prepare_accelerator(accelerator)
    model, _ = accelerator.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))
    mesh = accelerator.torch_device_mesh
    mine = slice(mesh["dp_shard"].get_local_rank(), mesh["dp_shard"].get_local_rank() + 1)
    parts = [one[mine].clone() for one in (tokens, labels, positions)]
    with accelerator.maybe_context_parallel(buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(parts)):
        assert parts[0].shape == (1, SEQUENCE // 2)
        accelerator.backward(loss(model, *parts, group=mesh["cp"].get_group()))
    for (name, param), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        error = (param.grad.full_tensor() - expected.grad).norm() / expected.grad.norm()
        # FP32 sums of up to 256 terms in another order: roundings of 2**-24 that grow with the root of their number.
        assert error < 2**-24 * 256**0.5, (name, error)


def check() -> None:
    allow_fsdp_on_cpu()
    assert "FSDP2: FP32 sums over 4 ranks" in check_sums("rank_order", mean)
    check_sums_by_nccl()
    check_a_split_sequence()


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_are_summed_over_the_parts_of_a_sequence():
    on_ranks(check, 4)
