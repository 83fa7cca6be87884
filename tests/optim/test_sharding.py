"""Shards of DTensors: the global indices of their elements, and steps on them in real processes."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from hf_lowprec.optim import AdamW, sharding
from tests.support.processes.ranks import run_ranks, run_script
from tests.support.processes.shards import has_shard_of, shard
from tests.support.triton_available import require_triton


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["native", pytest.param("triton", marks=pytest.mark.every_case)])
def test_sharded_steps_are_the_steps_on_the_full_tensors(backend):
    if backend == "triton":
        require_triton()
        if torch.cuda.is_available():
            pytest.skip("gloo ranks hold CPU tensors; Triton's interpreter is for machines without a GPU")
    count = 10 if backend == "native" else 4
    assert f"{count} shardings agree" in run_ranks("sharded_steps.py", 4, backend)


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_states_in_8_bits_are_those_of_the_full_tensors_or_refused():
    printed = run_script("sharded_8_bit_states.py")
    assert "4 shardings over 3 ranks agree, 3 are refused" in printed
    assert "6 shardings over 4 ranks agree, 2 are refused" in printed


def test_columns_are_stepped_as_in_the_full_tensor(two_fake_ranks, backend):
    """Rank 0 of two has half of each row, so its elements are at other places than in the full tensor."""
    mesh, random = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    full, grad = (torch.randn(6, 10, generator=random).bfloat16() for _ in range(2))
    optimizers = []
    for place in (lambda tensor: tensor.clone(), lambda tensor: shard(tensor, mesh, [Shard(1)])):
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


def test_a_plain_tensor_is_one_run():
    assert list(sharding.contiguous_runs(torch.empty(3, 4))) == [(0, 12, 0)]
    assert list(sharding.contiguous_runs(torch.empty(()))) == [(0, 1, 0)]
    assert list(sharding.contiguous_runs(torch.empty(0, 4))) == []


def test_rows_are_one_run_and_columns_one_per_row():
    rows = fake_dtensor((10, 6), (3, 6), Shard(0), coordinate=(2,))
    assert list(sharding.contiguous_runs(rows)) == [(0, 18, 36)]
    columns = fake_dtensor((3, 10), (3, 3), Shard(1), coordinate=(1,))
    assert list(sharding.contiguous_runs(columns)) == [(0, 3, 3), (3, 3, 13), (6, 3, 23)]


def test_an_empty_shard_has_no_run():
    assert list(sharding.contiguous_runs(fake_dtensor((2, 5), (0, 5), Shard(0), coordinate=(3,)))) == []


def test_an_index_beyond_32_bits():
    """The last quarter of an embedding of 2³⁴ elements, without allocating it."""
    shard = torch.empty(1).expand(2**17, 2**15)
    table = fake_dtensor((2**19, 2**15), (1,), Shard(0), coordinate=(3,))
    table._local_tensor = shard
    assert list(sharding.contiguous_runs(table)) == [(0, 2**32, 3 * 2**32)]


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
