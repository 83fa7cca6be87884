"""Muon on several ranks: each matrix is orthogonalized by one of them, to the bits of one process.

Steps on shards of all kinds are in `test_sharded_steps.py`.
"""

from contextlib import closing, nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Size, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import hf_lowprec
from benchmarks.muon_shares import KINDS, LLAMA_8B, shares
from hf_lowprec import Muon, PrecisionMonitor
from hf_lowprec.optim.sharding import FlatPart, Sharding, set_flat_part, set_replicas
from hf_lowprec.optim.step import orthogonalization, whole_tensor_quantities
from hf_lowprec.optim.step.fused_group import CHUNK
from hf_lowprec.optim.step.matrix_owners import MatrixOwners, assign, cost
from hf_lowprec.optim.step.sharing_ranks import ranks_that_share
from hf_lowprec.tools.estimate.activations import LiveMemory
from hf_lowprec.tools.estimate.memory import step_peak
from tests.support.optim.backward_pass import give_gradients
from tests.support.processes.ranks import on_ranks
from tests.support.processes.shards import digest, of_every_rank, shard
from tests.support.training.tiny_trainer import llama


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "most"), [(2, 1), (8, 1), (64, 1.12)])
def test_ranks_get_equal_shares_of_a_large_model(kind, ranks, most):
    """Those of Llama-3.1-8B. Of a part of a step, a rank has two matrices at most: its own elements, and a result."""
    found = shares(kind, ranks)
    assert max(found.work, found.elements) <= most
    assert found.held <= (2.2 if kind == "ZeRO 1 and 2" else 2)


def test_replicas_of_several_ranks_get_equal_shares():
    """8 x 8 of them; each matrix is in one part."""
    shapes = sorted(LLAMA_8B, key=Size.numel, reverse=True)
    rounds, owners = assign(shapes, 8, 8, {}, CHUNK, first=5)
    work = dict.fromkeys(product(range(8), range(8)), 0)
    for replica, part in (item for parts in rounds for item in parts.items()):
        assert len(part) <= 8
        for k in part:
            work[replica, owners[k]] += cost(shapes[k])
    assert max(work.values()) <= 1.3 * sum(work.values()) / 64
    assert sorted(k for parts in rounds for part in parts.values() for k in part) == list(range(len(shapes)))


def test_with_more_ranks_than_matrices_each_gets_one():
    assert len(set(assign(LLAMA_8B, 512, 1, {}, CHUNK)[1])) == len(LLAMA_8B)


def test_whole_matrices_of_a_partition_are_not_sent(monkeypatch):
    """Of two ranks, each holds one matrix."""
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: pytest.fail("a matrix is sent"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        shards = [torch.arange(12.0).bfloat16(), torch.empty(0, dtype=torch.bfloat16)]
        for k, bounds in enumerate([(0, 12, 12), (0, 0, 12)]):
            set_flat_part(shards[k], FlatPart(k, "", Size([3, 4]), 0, bounds, dist.group.WORLD))
        ranks = ranks_that_share(dist.group.WORLD, torch.device("cpu"), without_replicas=False)
        owners = MatrixOwners(shards, ranks, CHUNK, lambda *_: 1, first=1)
        found = owners.gather(dict(enumerate(shards)))()
        assert torch.equal(found.pop(0), shards[0].view(3, 4)) and not found
    finally:
        dist.destroy_process_group()


SHAPES = [(20, 12), (12, 20), (20, 12), (9, 7), (3, 8, 8), (20, 12), (1, 5), (12, 20), (6, 6)]
MESHES = {
    "one": ((1,), [Shard(0)]),
    "shards": ((3,), [Shard(0)]),
    "DDP": ((2,), None),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "rows and columns": ((2, 4), [Shard(0), Shard(1)]),
}


def check_owners(kind: str) -> None:
    """Steps on `SHAPES`, compared with those of this process alone; and who orthogonalizes how much in three.

    In the fourth, the ranks of one replica measure what the step does.
    """
    dist.init_process_group("gloo")
    dist.new_group([0])  # ranks are in different numbers of groups
    orthogonalization.CHUNK = 300  # several parts
    sizes, placements = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes)
    generator = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    if placements is None:
        parts = [nn.Parameter(param.detach().clone()) for param in whole]
        set_replicas(parts, dist.group.WORLD, lambda: True)
    else:
        parts = [nn.Parameter(shard(param.detach().clone(), mesh, placements)) for param in whole]
    alone, shared = (Muon(params, lr=0.1, rounding="split", normalize_rows=True) for params in (whole, parts))
    own = Counter(shared)
    for step in range(4):
        first_replica = dist.get_rank() == 0 if placements is None else kind != "hybrid" or mesh.get_local_rank(0) == 0
        counts = own.elements
        for param in whole:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        grads = [param.grad.clone() if placements is None else shard(param.grad, mesh, placements) for param in whole]
        give_gradients(shared, parts, grads)
        with closing(PrecisionMonitor(shared, every=1)) if step == 3 and first_replica else nullcontext():
            shared.step()
        alone.step()
    for param, part in zip(whole, parts, strict=True):
        found = part if placements is None else part.full_tensor()
        assert torch.equal(found, param), (kind, tuple(param.shape))
    counts = of_every_rank(counts)
    assert sum(counts) == 3 * sum(param.numel() for param in whole)
    assert min(counts) > 0 and max(counts) <= sum(counts) / len(counts) + 3 * 2 * 240
    dist.destroy_process_group()


def check_experts() -> list[int]:
    """A step of a stack of large matrices; how many of them each rank orthogonalizes."""
    dist.init_process_group("gloo")
    mesh, size = init_device_mesh("cpu", (3,)), (264, 264)
    whole = nn.Parameter(torch.randn(4, *size, generator=torch.Generator().manual_seed(1)).bfloat16())
    part = nn.Parameter(shard(whole.detach().clone(), mesh, [Shard(0)]))
    alone, shared = (Muon([param], lr=0.1, rounding="split", normalize_rows=True) for param in (whole, part))
    own = Counter(shared)
    whole.grad = torch.randn(4, *size, generator=torch.Generator().manual_seed(2)).bfloat16()
    part.grad = shard(whole.grad, mesh, [Shard(0)])
    for optimizer in (alone, shared):
        optimizer.step()
    assert torch.equal(part.full_tensor(), whole)
    return of_every_rank(own.elements // (264 * 264))


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_hold_whole_experts_orthogonalize_their_own():
    assert on_ranks(check_experts, 3) == [2, 2, 0]


def check_accelerate() -> list[list[int]]:
    """Steps under DDP, of which the second has gradients of this rank alone: elements that each rank orthogonalizes."""
    accelerator, model = Accelerator(cpu=True), llama()
    hf_lowprec.prepare_accelerator(accelerator)
    hf_lowprec.cast_model(model)
    matrices = hf_lowprec.hidden_matrices(model)
    optimizer = Muon(model.parameters(), lr=0.1, rounding="split", matrices=matrices)
    model, prepared = accelerator.prepare(model, optimizer)
    own = Counter(optimizer)
    tokens, found = torch.arange(8)[None] + accelerator.process_index, []
    for is_local in (False, True, False):
        with model.no_sync() if is_local else nullcontext():
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        own.elements = 0
        prepared.step()
        prepared.zero_grad()
        assert len({*of_every_rank(digest(model.parameters(), optimizer))}) == 1 or found
        found.append(of_every_rank(own.elements))
    return [[sum(matrix.numel() for matrix in matrices)], *found]


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_makes_ddp_share_the_work():
    (total,), first, local, last = on_ranks(check_accelerate, 2)
    assert sum(first) == total and min(first) > 0.4 * total
    assert local == [total, total] and last == first


def check_some_replicas() -> list[int]:
    """A step of two matrices of which ranks share one."""
    dist.init_process_group("gloo")
    params = [nn.Parameter(torch.full((4, 6), 0.5).bfloat16()) for _ in range(2)]
    set_replicas(params[:1], dist.group.WORLD, lambda: True)
    optimizer = Muon(params)
    own = Counter(optimizer)
    for param in params:
        param.grad = torch.eye(4, 6).bfloat16()
    optimizer.step()
    return of_every_rank(own.elements)


@pytest.mark.slow
@pytest.mark.distributed
def test_matrices_that_only_some_ranks_have_are_not_shared():
    assert on_ranks(check_some_replicas, 2) == [48, 48]


@pytest.mark.parametrize(("at_once", "are_sent"), [(1, False), (2, False), (3, True), (8, True)])
def test_experts_stay_where_they_are_unless_they_are_orthogonalized_with_others(at_once, are_sent, monkeypatch):
    """Eight on four ranks."""
    sent = []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: sent.extend(operations) or [])
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        part = DTensor.from_local(torch.ones(2, 3, 4, dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False)
        ranks = ranks_that_share(Sharding(mesh, (0,)), torch.device("cpu"), without_replicas=False)
        MatrixOwners([part], ranks, CHUNK, lambda *_: at_once, first=0).gather({0: part.to_local()})
    finally:
        dist.destroy_process_group()
    assert bool(sent) is are_sent


class Counter:
    """Counts the elements that an optimizer orthogonalizes."""

    def __init__(self, optimizer: Muon) -> None:
        self.elements, original = 0, optimizer.orthogonalize

        def counted(group, matrix):
            self.elements += matrix.numel()
            return original(group, matrix)

        optimizer.orthogonalize = counted


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", MESHES)
def test_each_matrix_has_one_owner_and_the_bits_of_one_process(kind):
    on_ranks(check_owners, torch.Size(MESHES[kind][0]).numel(), kind)


def check_memory() -> list[int]:
    """The peak of a step of shards, and the estimate, in bytes."""
    dist.init_process_group("gloo")
    orthogonalization.CHUNK = whole_tensor_quantities.CHUNK = 1000  # one matrix per rank; FP32 values of few elements
    mesh, matrix = init_device_mesh("cpu", (4,)), torch.ones(96, 160, dtype=torch.bfloat16)
    optimizer = Muon([nn.Parameter(shard(matrix, mesh, [Shard(0)])) for _ in range(8)], rounding="split")
    for _ in range(2):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = param.detach().clone()
        with LiveMemory() as memory:
            optimizer.step()
    whole = Muon([nn.Parameter(matrix.to("meta")) for _ in range(8)], rounding="split")
    return [memory.peak, step_peak(whole, gpus=4)]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_step_of_shards_takes_the_memory_that_is_estimated():
    measured, estimated = on_ranks(check_memory, 4)
    assert 0.9 * estimated < measured <= estimated


@pytest.mark.parametrize("ranks", [2, 16])
def test_memory_does_not_grow_with_the_number_of_replicas(ranks, monkeypatch):
    """Two slots of 2 bytes per element, and 8 bytes for the matrix that is orthogonalized."""
    monkeypatch.setattr(orthogonalization, "CHUNK", 100)
    monkeypatch.setattr(whole_tensor_quantities, "CHUNK", 100)  # FP32 values of few elements
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    try:
        params = [nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16)) for _ in range(40)]
        set_replicas(params, dist.group.WORLD, lambda: True)
        optimizer = Muon(params, rounding="stochastic", backend="native")
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        with LiveMemory() as memory:
            optimizer.step()
    finally:
        dist.destroy_process_group()
    assert memory.peak <= 12 * 128 * 128 + 1024 * len(params)
