"""Settings as plain values; their comparison between ranks is in `tests/distributed/test_rank_differences.py`."""

import torch

from hf_lowprec.reduction.compare_ranks import to_plain_value


def test_a_device_is_the_same_on_every_rank_but_for_its_index():
    assert to_plain_value({"device": torch.device("cuda", 0)}) == to_plain_value({"device": torch.device("cuda", 1)})
    assert to_plain_value(torch.device("cuda", 0)) != to_plain_value(torch.device("cpu"))
