"""Ranks under ZeRO are killed, mostly while they save; a resumed run ends with the same bits all the same."""

import pytest

from tests.distributed.test_chaos import IN_8_BITS, lose_nothing

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.every_case]


@pytest.mark.parametrize(
    ("kind", "optim", "options"),
    [
        ("zero1", "adamw_bf16_split", []),
        ("zero2", "adamw_bf16_kahan", [IN_8_BITS]),
        ("zero3", "adamw_bf16_split", []),
    ],
)
def test_nothing_is_lost_by_kills(kind, optim, options, tmp_path):
    lose_nothing((kind, optim, options), tmp_path)
