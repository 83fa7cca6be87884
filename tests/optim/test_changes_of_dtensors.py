"""DTensors that others change between steps, on one of two ranks that only seem to be there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_lowprec.optim import AdamW
from hf_lowprec.rounding.attached_low_bits import attach_low_bits

BACKENDS = ("eager", "native")
STATES = ("exp_avg", "exp_avg_sq", "compensation")


@pytest.fixture
def ranks():
    """A mesh of two ranks, of which only the first is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sharded(ranks, local, placement=None) -> DTensor:
    return DTensor.from_local(local, ranks, [placement or Shard(0)])


def give_gradients(ranks, params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        is_dtensor = isinstance(param, DTensor)
        local = torch.randn(param.to_local().shape if is_dtensor else param.shape, generator=generator).bfloat16()
        param.grad = sharded(ranks, local, param.placements[0]) if is_dtensor else local


def stepped(ranks, backend):
    """Two sharded parameters and a plain one between them, as FSDP2 leaves those that it ignores; two steps taken."""
    params = [
        nn.Parameter(sharded(ranks, torch.linspace(-1, 1, 24).bfloat16().view(4, 6))),
        nn.Parameter(torch.linspace(-1, 1, 5).bfloat16()),
        nn.Parameter(sharded(ranks, torch.linspace(-1, 1, 36).bfloat16().view(6, 6))),
    ]
    optimizer = AdamW(params, lr=0.1, backend=backend)
    for step in range(2):
        give_gradients(ranks, params, step)
        optimizer.step()
    return params, optimizer


def change_nothing(ranks, params, states):
    pass


def replace_state(ranks, params, states):
    states[0]["exp_avg"] = sharded(ranks, torch.full((4, 6), 0.25).bfloat16())


def move_local_tensor_of_state(ranks, params, states):
    local = states[2]["exp_avg"].to_local()
    local.data = local.data.clone()


def replace_local_tensor_of_param(ranks, params, states):
    """As FSDP2 does when a model was moved."""
    params[0]._local_tensor = params[0]._local_tensor * 0.5


def set_count(ranks, params, states):
    states[2]["step"] = torch.tensor(7)


CHANGES = [change_nothing, replace_state, move_local_tensor_of_state, replace_local_tensor_of_param, set_count]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_dtensors_between_steps_counts(ranks, change, backend):
    """The same as with a new optimizer that is handed everything."""
    params, optimizer = stepped(ranks, backend)
    change(ranks, params, [optimizer.state[param] for param in params])
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    other = AdamW(twins, lr=0.1, backend="eager")
    for param, twin in zip(params, twins, strict=True):
        other.state[twin] = {name: value.clone() for name, value in optimizer.state[param].items()}
    for step in range(2, 5):
        for tensors, each in ((params, optimizer), (twins, other)):
            give_gradients(ranks, tensors, step)
            each.step()
    for param, twin in zip(params, twins, strict=True):
        for name, tensor, expected in [
            ("param", param, twin),
            *((name, optimizer.state[param][name], other.state[twin][name]) for name in (*STATES, "step")),
        ]:
            actual, expected = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, expected))
            assert torch.equal(actual, expected), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_standing_plan_takes_no_other_gradient(ranks, backend):
    params, optimizer = stepped(ranks, backend)
    before = [param.detach().clone() for param in params]
    give_gradients(ranks, params, 2)
    params[2].grad._local_tensor = torch.ones(3, 6).bfloat16()
    with pytest.raises(ValueError, match="shape"):
        optimizer.step()
    assert all(map(torch.equal, (p.to_local() for p in params[::2]), (b.to_local() for b in before[::2])))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_may_be_placed_by_new_specs_in_every_step(ranks, backend):
    """As torch's autograd makes them for tensor-parallel layers; the plan stands."""
    params, optimizer = stepped(ranks, backend)
    plan = optimizer._plan
    for step in range(2, 4):
        give_gradients(ranks, params, step)
        params[0].grad._spec = type(params[0].grad._spec)(ranks, (Shard(0),), params[0].grad._spec.tensor_meta)
        optimizer.step()
    assert optimizer._plan is plan


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_still_communicated_is_waited_for(ranks, backend):
    """Until then, its local tensor is a wrapper whose address is 0."""
    params = [nn.Parameter(distribute_tensor(torch.ones(8).bfloat16(), ranks, [Replicate()])) for _ in range(2)]
    optimizers = [AdamW([param], lr=0.1, backend=backend, first_parameter=0) for param in params]
    for _ in range(2):
        partial = DTensor.from_local(torch.ones(8).bfloat16(), ranks, [Partial()])
        params[0].grad = partial.redistribute(placements=[Replicate()], async_op=True)
        params[1].grad = partial.redistribute(placements=[Replicate()])
        assert params[0].grad._local_tensor.data_ptr() == 0
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(*(param.to_local() for param in params))
    assert not torch.equal(params[0].to_local(), torch.ones(8).bfloat16())


def test_low_bits_of_shards_are_not_saved(ranks):
    """Each rank would save its own under the same number."""
    params = [nn.Parameter(sharded(ranks, torch.ones(4, 6).bfloat16())), nn.Parameter(torch.ones(5).bfloat16())]
    for param in params:
        attach_low_bits(param, torch.full(param.to_local().shape if param is params[0] else param.shape, 3).short())
    assert AdamW(params, rounding="split").state_dict()["low_bits"].keys() == {1}


def test_loaded_states_of_cut_blocks_are_not_converted_to_8_bits(ranks):
    """96 elements of a row over two ranks, in blocks of 32."""
    param = nn.Parameter(sharded(ranks, torch.linspace(-1, 1, 192).bfloat16().view(4, 48), Shard(1)))
    optimizer = AdamW([param])
    give_gradients(ranks, [param], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["state_dtype"] = torch.int8
    with pytest.raises(ValueError, match=r"48 elements of a row per rank, which cuts blocks of 32"):
        optimizer.load_state_dict(saved)
