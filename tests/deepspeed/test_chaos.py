"""Ranks under ZeRO are killed, mostly while they save; a resumed run ends with the same bits all the same."""

import pytest

from tests.distributed.test_chaos import IN_8_BITS, lose_nothing

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ZERO_1 = pytest.param("zero1", "adamw_bf16_split", [], marks=pytest.mark.every_case)


@pytest.mark.parametrize(
    ("kind", "optim", "options"),
    [ZERO_1, ("zero2", "adamw_bf16_kahan", [IN_8_BITS]), ("zero3", "adamw_bf16_split", [])],
)
@pytest.mark.combinations(1)
def test_nothing_is_lost_by_kills(kind, optim, options, tmp_path):
    lose_nothing((kind, optim, options), tmp_path)
