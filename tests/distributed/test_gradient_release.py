"""Gradient release on several ranks: the bits of the ordinary step, whatever the wrapper, and freed gradients."""

from itertools import product

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("ranks", "kinds", "roundings"),
    [
        pytest.param(2, "ddp-small_buckets,fsdp2", "kahan", marks=pytest.mark.every_case),
        pytest.param(3, "ddp-small_buckets,fsdp2", "split-int8", marks=pytest.mark.every_case),
        (4, "hsdp", "kahan,split-int8"),
    ],
)
def test_released_steps_are_the_ordinary_ones(ranks, kinds, roundings):
    """All kinds see the same batches on all ranks, so they have the bits of one process, and the same norms."""
    printed = run_ranks("gradient_release_on_ranks.py", ranks, kinds, roundings)
    lines = [line.split() for line in printed.splitlines() if line]
    assert [line[:2] for line in lines] == [list(pair) for pair in product(kinds.split(","), roundings.split(","))]
    for kind, _, ordinary, released, share, *norms in lines:
        assert released == ordinary, kind
        assert float(share) < (0.8 if "ddp" in kind else 0.5), kind  # under DDP, three of its buckets are in flight
        assert all(float(norm) > 0.25 for norm in norms) and len(norms) == 3, kind
    for rounding in roundings.split(","):
        same = [line for line in lines if line[1] == rounding]
        assert len({tuple(line[2:4]) for line in same}) == len({tuple(line[5:]) for line in same}) == 1


def test_the_stock_trainer_gives_the_same_bits(tmp_path):
    """On two ranks with different batches: released under FSDP2, and clipped by the same delayed norms under both."""
    fixed = "--max_steps 4 --learning_rate 1e-2 --per_device_train_batch_size 2 --save_strategy no"
    release = ["--max_grad_norm", "0", "--optim_args", "gradient_release=True"]
    delayed = ["--max_grad_norm", "0.5", "--optim_args", "gradient_release=True,clip=delayed"]
    digests = []
    for kind, options in (("ddp", release[:2]), ("fsdp2", release), ("ddp", delayed), ("fsdp2", delayed)):
        words = [*fixed.split(), "--optim", "adamw_bf16_kahan", "--output_dir", str(tmp_path / kind), *options]
        printed = run_ranks("trainer_ranks.py", 2, kind, *words, BUCKET_ELEMENTS="4000")
        digests += [line for line in printed.splitlines() if line.startswith("digest=")]
    ordinary, released, *clipped = digests
    assert released == ordinary and clipped[0] == clipped[1] != ordinary
