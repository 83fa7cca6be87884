"""`BucketAverager` by itself: chunks, groups, interrupted and overlapping passes."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_lowprec.reduction import BucketAverager, ddp
from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import on_ranks
from tests.support.reduction.numpy_reference import as_tensor, gradients, mean, same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def run_pass(averager: BucketAverager, buckets: list[torch.Tensor], sizes: list, seed: int, late: int = 0) -> None:
    """Fill the buckets with this rank's gradients, average, compare; a rank is slowed down by its number and `late`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [gradients(dtype, (size,), ranks, 100 * seed + k) for k, (size, dtype) in enumerate(sizes)]
    futures = []
    for k, bucket in enumerate(buckets):
        bucket.copy_(as_tensor(every[k][rank]))
        if late:
            time.sleep(0.004 * ((rank * late + k) % 3))
        futures.append(averager(bucket, k == 0, k == len(buckets) - 1))
    for k, (bucket, future) in enumerate(zip(buckets, futures, strict=True)):
        assert future.done(), k
        assert future.value() is bucket, k
        assert same_bits(bucket, mean(every[k])), f"rank {rank} of {ranks}: pass {seed}, bucket {k} of {sizes}"


def make(sizes: list) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=dtype) for size, dtype in sizes]


def check_scratch(averager: BucketAverager, sizes: list) -> None:
    """Scratch memory is two received and two padded chunks of the largest bucket of each dtype, at most."""
    ranks = dist.get_world_size()
    largest: dict[torch.dtype, int] = {}
    for size, dtype in sizes:
        largest[dtype] = max(largest.get(dtype, 0), -(-size * dtype.itemsize // (ranks * 128)) * ranks * 128)
    assert averager.scratch.nbytes <= 4 * sum(largest.values()), (sizes, averager.scratch.nbytes)


def check_on_last_bucket() -> None:
    """`on_last_bucket` is called once per pass, when the results are complete."""
    ranks, seen = dist.get_world_size(), []
    buckets = make([(10, BF16), (11, BF16), (12, BF16)])
    averager = BucketAverager(dist.group.WORLD, lambda: seen.append([bucket[0].item() for bucket in buckets]))
    for turn in range(2):
        for k, bucket in enumerate(buckets):
            bucket.fill_(2.0 * dist.get_rank() + turn)
            averager(bucket, k == 0, k == 2)
    assert ranks == 1 or seen == [[ranks - 1.0] * 3, [ranks + 0.0] * 3], seen


def check_overlap() -> None:
    """Backward continues while a bucket is in flight: rank 0's first call returns before others have that bucket."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    other_group, token = dist.new_group(), torch.zeros(1)
    averager = BucketAverager(dist.group.WORLD)
    every = [gradients(BF16, (1001,), ranks, seed) for seed in (1, 2)]
    buckets = [as_tensor(one[rank]) for one in every]
    if rank:
        dist.recv(token, 0, group=other_group)
    averager(buckets[0], True, False)
    for other in range(1, ranks) if rank == 0 else ():
        dist.send(token, other, group=other_group)
    averager(buckets[1], False, True)
    for bucket, wanted in zip(buckets, every, strict=True):
        assert same_bits(bucket, mean(wanted))


def check_interrupted(buckets_before: int, late: float) -> None:
    """A pass ends before its last bucket; all ranks continue with a complete pass, one of them late.

    After more than one bucket, the first is being written back into its memory, and ranks wait for each other before
    they put new gradients there. (DDP itself does not continue with the buckets of an interrupted pass.)
    """
    ranks = dist.get_world_size()
    sizes = [(ranks * 100, BF16), (ranks * 200, BF16), (ranks * 50 + 1, BF16), (7, BF16)]
    buckets = make(sizes)
    averager = BucketAverager(dist.group.WORLD)
    for turn in range(3):
        for k in range(buckets_before):
            buckets[k].fill_(1000.0)
            if dist.get_rank() == 1 and k == buckets_before - 1:
                time.sleep(late)
            averager(buckets[k], k == 0, False)
        if buckets_before > 1:
            dist.barrier()
            time.sleep(0.02)
        run_pass(averager, buckets, sizes, 70 + turn)
        run_pass(averager, buckets, sizes, 80 + turn)
    check_scratch(averager, sizes)


def check_group() -> None:
    """A group of some ranks averages over those ranks only."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(1, ranks)))
    if rank:
        every = gradients(BF16, (77,), ranks, seed=1)
        bucket = as_tensor(every[rank])
        BucketAverager(group)(bucket, True, True)
        assert same_bits(bucket, mean(every[1:]))


def check_chunks() -> None:
    """Buckets larger than a chunk, as DDP's first one is, need scratch memory for two chunks, padded or not."""
    sizes = [(5001, BF16), (500, BF16), (2503, FP32), (1, BF16), (4000, BF16)]
    with mock.patch.object(ddp, "CHUNK_BYTES", 1000):
        averager = BucketAverager(dist.group.WORLD)
        buckets = make(sizes)
        for turn in range(3):
            run_pass(averager, buckets, sizes, 90 + turn, late=turn)
        assert averager.scratch.nbytes <= 2 * 4 * 1000, averager.scratch.nbytes  # per dtype


def check_alignment() -> None:
    """Shards of full and of padded chunks begin on multiples of 128 bytes; a chunk that needs no padding gets none."""
    ranks, shards = dist.get_world_size(), []

    def record(received: torch.Tensor, divisor: int, out: torch.Tensor) -> torch.Tensor:
        shards.append(received.shape[1] * received.element_size())
        return mean_in_rank_order(received, divisor, out)

    mean_in_rank_order = ddp.mean_in_rank_order
    sizes = [(4097, BF16), (1, BF16), (4099, FP32), (ranks * 100, BF16), (ranks * 100 + 1, FP16)]
    with (
        mock.patch.object(ddp, "CHUNK_BYTES", ranks * 128 * 7 + 100),
        mock.patch.object(ddp, "mean_in_rank_order", record),
    ):
        run_pass(BucketAverager(dist.group.WORLD), make(sizes), sizes, 60)
    assert set(shards) - {200} <= set(range(128, 129 * 7, 128)), shards
    assert ranks == 1 or {200, 7 * 128} <= set(shards), shards


def check() -> None:
    dist.init_process_group("gloo")
    check_chunks()
    check_alignment()
    check_on_last_bucket()
    check_interrupted(1, late=0.05)
    check_interrupted(3, late=0)
    if dist.get_world_size() > 1:
        check_group()
        check_overlap()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", (1, 2, 3, 8) if EVERY_CASE else (3,))
def test_buckets_are_means_in_rank_order(ranks: int) -> None:
    on_ranks(check, ranks)
