"""The low bits of an FP32 model survive `prepare`, however the training is distributed."""

import functools

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@functools.cache
def digests(ranks: int, kinds: str) -> dict[str, str]:
    """Digests of weights and states after three steps on the same batches in every process.

    The script checks on every rank that the FP32 weights are there to 2**-16 before the first step.
    """
    return dict(line.split() for line in run_ranks("low_bits_on_ranks.py", ranks, kinds).splitlines())


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        pytest.param(2, "ddp,fsdp2,fsdp2-ram_efficient", marks=pytest.mark.every_case),
        (3, "ddp,fsdp2,fsdp2-ram_efficient"),  # of 36 rows: uneven
        pytest.param(4, "hsdp", marks=pytest.mark.every_case),
    ],
)
def test_training_continues_from_the_fp32_weights_as_in_one_process(ranks, kinds):
    (alone,) = digests(1, "ddp").values()
    assert digests(ranks, kinds) == dict.fromkeys(kinds.split(","), alone)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("adamw_bf16_split", "adamw_bf16_split"),
        pytest.param("adamw_bf16_split", "adamw_bf16_kahan", marks=pytest.mark.every_case),
        pytest.param("loop", "adamw_bf16_split", marks=pytest.mark.every_case),
    ],
)
def test_a_second_trainer_under_ddp_begins_where_the_first_training_has_ended(first, second):
    lines = run_ranks("second_trainer.py", 2, first, second).splitlines()
    assert lines.count("the second Trainer has begun where the first has ended") == 2
