"""Shards of DTensors: the global indices of their elements, steps on them, and what changes between steps."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hf_lowprec.optim import AdamW, sharding
from hf_lowprec.rounding.attached_low_bits import attach_low_bits
from tests.support.processes.shards import has_shard_of, shard


@pytest.fixture
def ranks(two_fake_ranks):
    """A mesh of two ranks, of which only the first is there."""
    return init_device_mesh("cpu", (2,))


def test_columns_are_stepped_as_in_the_full_tensor(ranks, backend):
    """Rank 0 of two has half of each row, so its elements are at other places than in the full tensor."""
    random = torch.Generator().manual_seed(0)
    full, grad = (torch.randn(6, 10, generator=random).bfloat16() for _ in range(2))
    optimizers = []
    for place in (lambda tensor: tensor.clone(), lambda tensor: shard(tensor, ranks, [Shard(1)])):
        param = torch.nn.Parameter(place(full))
        param.grad = place(grad)
        optimizers.append(AdamW([param], rounding="stochastic", first_parameter=0, backend=backend))
        optimizers[-1].step()
    (whole, states), (half, states_of_half) = (next(iter(optimizer.state.items())) for optimizer in optimizers)
    assert has_shard_of(half, whole)
    assert all(has_shard_of(states_of_half[name], states[name]) for name in ("exp_avg", "exp_avg_sq"))


def fake_dtensor(shape, shard, *placements, mesh=(4,), coordinate=(0,)) -> SimpleNamespace:
    """The attributes of a DTensor that `contiguous_runs` reads."""
    device_mesh = SimpleNamespace(
        ndim=len(mesh), size=lambda dim: mesh[dim], get_coordinate=lambda: coordinate, get_group=lambda dim: dim
    )
    return SimpleNamespace(
        shape=torch.Size(shape), _local_tensor=torch.empty(shard), placements=placements, device_mesh=device_mesh
    )


def last_quarter_of_an_embedding() -> SimpleNamespace:
    """Of 2³⁴ elements, without allocating it."""
    table = fake_dtensor((2**19, 2**15), (1,), Shard(0), coordinate=(3,))
    table._local_tensor = torch.empty(1).expand(2**17, 2**15)
    return table


@pytest.mark.parametrize(
    ("tensor", "runs"),
    [
        (torch.empty(3, 4), [(0, 12, 0)]),
        (torch.empty(()), [(0, 1, 0)]),
        (torch.empty(0, 4), []),
        (fake_dtensor((10, 6), (3, 6), Shard(0), coordinate=(2,)), [(0, 18, 36)]),
        (fake_dtensor((3, 10), (3, 3), Shard(1), coordinate=(1,)), [(0, 3, 3), (3, 3, 13), (6, 3, 23)]),
        (fake_dtensor((2, 5), (0, 5), Shard(0), coordinate=(3,)), []),
        (last_quarter_of_an_embedding(), [(0, 2**32, 3 * 2**32)]),
    ],
    ids=["plain", "a number", "empty", "rows", "columns", "empty shard", "beyond 32 bits"],
)
def test_rows_are_one_run_and_columns_one_per_row(tensor, runs):
    assert list(sharding.contiguous_runs(tensor)) == runs


def test_a_shard_of_another_size_than_expected_raises():
    with pytest.raises(ValueError, match=r"\(10, 6\).*holds \(4, 6\) here, not the expected \(3, 6\)"):
        list(sharding.contiguous_runs(fake_dtensor((10, 6), (4, 6), Shard(0))))


def test_a_partial_tensor_raises():
    with pytest.raises(ValueError, match="a parameter is placed as P"):
        sharding.check_placements(fake_dtensor((4,), (4,), Partial()), "a parameter")


def test_replicas_are_not_summed():
    assert sharding.sharding_of(fake_dtensor((4,), (4,), Replicate())) is None
    found = sharding.sharding_of(fake_dtensor((4, 4), (4, 2), Replicate(), Shard(1), mesh=(2, 2), coordinate=(0, 0)))
    assert (found.mesh.size(1), found.mesh_dims) == (2, (1,))
    with mock.patch("torch.distributed.all_reduce") as all_reduce:
        sharding.sum_over_shards(torch.ones(()), found)
    assert [call.kwargs["group"] for call in all_reduce.call_args_list] == [1]


def test_a_plain_gradient_of_a_sharded_parameter_raises(mesh):
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    optimizer = AdamW([param], backend="eager")
    optimizer.step()
    before = param.full_tensor().clone()
    plain = mock.patch.object(type(param), "grad", torch.ones(4, 2))
    with plain, pytest.raises(ValueError, match="parameter 0 is placed as"):
        optimizer.step()
    assert torch.equal(param.full_tensor(), before)


# What may change between steps.

BACKENDS = ("eager", "native")
STATES = ("exp_avg", "exp_avg_sq", "remainder")


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
