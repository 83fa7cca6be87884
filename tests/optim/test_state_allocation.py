"""States on a CPU lie apart, cost at most a page for it, and are tensors like any other."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.state.states import PAGE, SMALLEST, zeros_apart
from hf_lowprec.rounding.modes import StoredState

LARGE = (SMALLEST // 2 // 64, 64)


def stepped(param: nn.Parameter, **arguments) -> AdamW:
    optimizer = AdamW([param], **arguments)
    param.grad = torch.full_like(param, 0.01)
    optimizer.step()
    return optimizer


def states(optimizer: AdamW) -> dict[str, torch.Tensor]:
    (state,) = optimizer.state.values()
    return {name: value for name, value in state.items() if name != "step"}


def distances(tensors: list[torch.Tensor]) -> list[int]:
    """Bytes between neighbours on the circle that a page's addresses make, the last and the first included."""
    places = sorted(local_shard(tensor).data_ptr() % PAGE for tensor in tensors)
    return [(after - before) % PAGE for before, after in zip(places, [*places[1:], places[0]], strict=True)]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [({"rounding": "stochastic"}, 2), ({"rounding": "kahan"}, 3), ({"rounding": "kahan", "amsgrad": True}, 4)],
)
def test_weight_and_states_share_a_page_evenly(arguments, number):
    param = nn.Parameter(torch.ones(LARGE, dtype=torch.bfloat16))
    tensors = [param, *states(stepped(param, **arguments)).values()]
    assert len(tensors) == number + 1
    # Even parts of a page, but for cutting down to whole lines of 64 bytes at both ends.
    assert min(distances(tensors)) > PAGE / len(tensors) - 64


def test_states_begin_on_a_line_also_where_the_weight_does_not():
    param = nn.Parameter(torch.ones(LARGE[0] + 1, 64, dtype=torch.bfloat16).view(-1)[3:-61].view(LARGE))
    assert param.data_ptr() % 64 == 6
    assert [value.data_ptr() % 64 for value in states(stepped(param)).values()] == [0, 0, 0]


def test_what_it_costs():
    large = nn.Parameter(torch.ones(LARGE, dtype=torch.bfloat16))
    for value in states(stepped(large)).values():
        assert value.untyped_storage().nbytes() == large.nbytes + PAGE
    small = nn.Parameter(torch.ones(LARGE[0] - 1, 64, dtype=torch.bfloat16))
    for value in states(stepped(small)).values():
        assert value.untyped_storage().nbytes() == small.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_are_zeros_of_the_parameters_shape(dtype):
    param = nn.Parameter(torch.ones(LARGE[::-1], dtype=torch.bfloat16).t())
    state = StoredState("exp_avg", role=1, dtype=dtype)
    made = zeros_apart(param, state, position=0, count=1)
    assert made.shape == param.shape
    assert made.dtype == dtype
    assert made.is_contiguous()
    assert not made.requires_grad
    assert not made.any()


def test_loaded_states_lie_apart_as_well():
    param = nn.Parameter(torch.linspace(-1, 1, SMALLEST // 2).bfloat16())
    optimizer = stepped(param)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    clone = nn.Parameter(param.detach().clone())
    resumed = AdamW([clone])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    offsets = [value.storage_offset() for value in states(optimizer).values()]
    assert offsets == [value.storage_offset() for value in states(resumed).values()]
    assert any(offsets)


def test_states_of_a_shard_are_distributed_as_it_is(mesh):
    plain = nn.Parameter(torch.linspace(-1, 1, SMALLEST // 2).bfloat16().view(LARGE))
    param = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    expected = states(stepped(plain, first_parameter=0))
    found = states(stepped(param, first_parameter=0))
    assert min(distances([param, *found.values()])) > PAGE / 4 - 64
    copied = copy.deepcopy(found)
    for name, value in found.items():
        like = torch.zeros_like(param, dtype=value.dtype)
        assert value._spec == like._spec, name
        assert torch.equal(value.full_tensor(), expected[name]), name
        assert torch.equal(copied[name].full_tensor(), expected[name]), name
    assert torch.equal(param.full_tensor(), plain)
