"""Gradient release on several ranks: the bits of the ordinary step, whatever the wrapper, and freed gradients."""

import ast
from itertools import product

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("ranks", "kinds", "roundings"),
    [
        pytest.param(2, "ddp-small_buckets,fsdp2", "kahan", marks=pytest.mark.every_case),
        pytest.param(3, "ddp-small_buckets,fsdp2", "split-int8", marks=pytest.mark.every_case),
        pytest.param(4, "hsdp", "kahan", marks=pytest.mark.every_case),
        (4, "hsdp", "split-int8"),
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


def test_the_stock_trainer_clips_alike_by_delayed_norms(tmp_path):
    """On two ranks with different batches, under DDP and under FSDP2; norms are larger than what they are clipped to.

    DDP's are those of whole gradients, FSDP2's are summed over shards.
    """
    words = "--max_steps 3 --learning_rate 1e-2 --per_device_train_batch_size 2 --save_strategy no --max_grad_norm 0.5"
    words += " --optim adamw_bf16_kahan --optim_args gradient_release=True,clip=delayed --output_dir"
    found = []
    for kind in ("ddp", "fsdp2"):
        printed = run_ranks("trainer_ranks.py", 2, kind, *words.split(), str(tmp_path / kind), BUCKET_ELEMENTS="4000")
        found.append(
            dict(line.split("=", 1) for line in printed.splitlines() if line.startswith(("digest=", "norms=")))
        )
    assert found[0]["digest"] == found[1]["digest"]
    norms = ast.literal_eval(found[0]["norms"].strip())
    assert len(norms) == 3 and min(norms) > 0.5
