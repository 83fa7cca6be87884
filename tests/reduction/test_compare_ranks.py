"""What is compared between ranks: settings, and the checksum of a tensor's bits, in Python's integers.

Ranks that differ are in `test_replicas.py` and `tests/distributed/test_rank_differences.py`.
"""

from itertools import combinations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.reduction import check_replicas, compare_ranks
from hf_lowprec.reduction.compare_ranks import checksum, synchronized_parameters, to_plain_value

PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]


def pattern(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(PATTERNS[tensor.element_size()])


def filled(dtype: torch.dtype, count: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    random = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(0))
    return random.to(PATTERNS[size]).view(dtype)


def test_without_ranks_there_is_nothing_to_compare():
    assert check_replicas(torch.nn.Linear(2, 2)) is None


def test_parameters_that_ddp_ignores_are_a_ranks_own():
    """They are found below DDP's prefix of names, and a tied one only if all of its names are ignored."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    names = ["0.weight", "0.bias", "1.bias"]
    assert [name for name, _ in synchronized_parameters(model)] == names
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    where = f"torch {torch.__version__} keeps them elsewhere"
    assert [name for name, _ in synchronized_parameters(model)] == names[:2], where
    outer = torch.nn.ModuleDict({"module": model})
    assert [name for name, _ in synchronized_parameters(outer)] == ["module.0.weight", "module.0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    assert [name for name, _ in synchronized_parameters(model)] == names, "DDP reduces it by its other name"
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "1.weight"])
    assert [name for name, _ in synchronized_parameters(model)] == names[1:]


def test_a_device_is_the_same_on_every_rank_but_for_its_index():
    assert to_plain_value({"device": torch.device("cuda", 0)}) == to_plain_value({"device": torch.device("cuda", 1)})
    assert to_plain_value(torch.device("cuda", 0)) != to_plain_value(torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_changes_the_checksum(dtype):
    tensor = filled(dtype, 9)
    before = checksum(tensor).item()
    flat = pattern(tensor)
    for element in range(tensor.numel()):
        for bit in range(8 * tensor.element_size()):
            mask = torch.tensor(1 << bit if bit < 63 else -(1 << 63)).to(flat.dtype)
            flat[element] ^= mask
            assert checksum(tensor).item() != before, (element, bit)
            flat[element] ^= mask
    assert checksum(tensor).item() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_an_exchange_of_any_two_elements_changes_the_checksum(dtype):
    """Numbers that differ only in their sign or their last bit are included."""
    tensor = torch.tensor([1.0, -1.0, 2.0, 0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.5, -1.5] * 3, dtype=dtype)
    before = checksum(tensor).item()
    for one, other in combinations(range(tensor.numel()), 2):
        if pattern(tensor)[one] != pattern(tensor)[other]:
            exchanged = tensor.clone()
            exchanged[[one, other]] = exchanged[[other, one]]
            assert checksum(exchanged).item() != before, (one, other)


def test_elements_far_apart():
    """Large tensors are read in chunks; positions continue from one to the next."""
    tensor = torch.zeros((1 << 20) * 2 + 3, dtype=torch.bfloat16)
    tensor[5] = 1.0
    sums = {checksum(tensor).item()}
    for place in (5 + (1 << 20), 5 + (1 << 21) - 4, (1 << 20) - 1, 1 << 20):
        moved = torch.zeros_like(tensor)
        moved[place] = 1.0
        sums.add(checksum(moved).item())
    assert len(sums) == 5


@pytest.mark.parametrize("count", [200_002, 200_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_checksum_is_a_sum_in_integers(dtype, count):
    """It sums patterns of up to 32 bits times odd weights of their positions, here over several chunks."""
    tensor = filled(dtype, count)
    words = tensor.view(torch.int16 if dtype == torch.bfloat16 and count % 2 else torch.int32)
    expected = sum(word * (2 * place * 0x1E3779B97F4A7C15 + 1) for place, word in enumerate(words.tolist()))
    assert (checksum(tensor).item() - expected) % 2**64 == 0


def test_the_checksum_is_of_values_and_not_of_their_layout():
    tensor = filled(torch.bfloat16, 60).view(6, 10)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(tensor[:, ::2]) == checksum(tensor[:, ::2].clone())
    flat = tensor.view(-1)
    assert checksum(flat[1:5]) == checksum(flat[1:5].clone())
    assert checksum(tensor.t()) != checksum(tensor)


def test_tensors_without_dimensions_or_elements():
    assert checksum(torch.tensor(1.0)).dtype == torch.int64
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))
    assert checksum(torch.empty(0, 3)).item() == 0
    assert checksum(torch.nn.Parameter(torch.ones(3))).requires_grad is False


@pytest.mark.parametrize("count", [1000, 1001])
def test_the_checksum_does_not_depend_on_the_size_of_chunks(monkeypatch, count):
    """Chunks are larger where each costs launches of kernels."""
    tensor = filled(torch.float32, count)
    expected = checksum(tensor).item()
    monkeypatch.setattr(compare_ranks, "_chunk_size", lambda device: 7)
    assert checksum(tensor).item() == expected


def test_few_launches_on_a_gpu():
    assert compare_ranks._chunk_size(torch.device("cpu")) == 1 << 16
    assert compare_ranks._chunk_size(torch.device("cuda", 1)) == 1 << 22


def test_a_tensor_on_the_meta_device_has_no_bits():
    found = checksum(torch.ones(3, 4, device="meta"))
    assert (found.item(), found.dtype, found.device.type) == (0, torch.int64, "cpu")
