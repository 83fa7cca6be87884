"""Shards of DTensors: their global indices, and steps on them in real processes."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hf_lowprec.optim import AdamW
from hf_lowprec.optim import sharding as shards
from tests.ranks import run_ranks
from tests.triton_here import require_triton


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_sharded_steps_are_the_steps_on_the_full_tensors(backend):
    if backend == "triton":
        require_triton()
        if torch.cuda.is_available():
            pytest.skip("gloo ranks hold CPU tensors; Triton's interpreter is for machines without a GPU")
    assert "10 shardings agree" in run_ranks("sharded_steps.py", 4, backend)


class Placed(SimpleNamespace):
    """What `runs` asks of a DTensor."""

    def to_local(self):
        return self.part


def placed(shape, part, *placements, mesh=(4,), coordinate=(0,)) -> Placed:
    device_mesh = SimpleNamespace(size=lambda dim: mesh[dim], get_coordinate=lambda: coordinate)
    return Placed(shape=torch.Size(shape), part=torch.empty(part), placements=placements, device_mesh=device_mesh)


def test_a_plain_tensor_is_one_run():
    assert list(shards.runs(torch.empty(3, 4))) == [(0, 12, 0)]
    assert list(shards.runs(torch.empty(()))) == [(0, 1, 0)]
    assert list(shards.runs(torch.empty(0, 4))) == []


def test_rows_are_one_run_and_columns_one_per_row():
    rows = placed((10, 6), (3, 6), Shard(0), coordinate=(2,))
    assert list(shards.runs(rows)) == [(0, 18, 36)]
    columns = placed((3, 10), (3, 3), Shard(1), coordinate=(1,))
    assert list(shards.runs(columns)) == [(0, 3, 3), (3, 3, 13), (6, 3, 23)]


def test_an_empty_shard_has_no_run():
    assert list(shards.runs(placed((2, 5), (0, 5), Shard(0), coordinate=(3,)))) == []


def test_an_index_beyond_32_bits():
    """The last quarter of a table of 2³⁴ elements, none of which is made."""
    part = torch.empty(1).expand(2**17, 2**15)
    table = placed((2**19, 2**15), (1,), Shard(0), coordinate=(3,))
    table.part = part
    assert list(shards.runs(table)) == [(0, 2**32, 3 * 2**32)]


def test_a_shard_of_another_size_than_expected_is_refused():
    with pytest.raises(ValueError, match=r"\(10, 6\).*holds \(4, 6\) here, and not the expected \(3, 6\)"):
        list(shards.runs(placed((10, 6), (4, 6), Shard(0))))


def test_a_partial_tensor_is_refused():
    with pytest.raises(ValueError, match="a parameter is placed as P"):
        shards.check_placements(placed((4,), (4,), Partial()), "a parameter")


def test_replicas_are_not_summed():
    assert shards.sharding_of(placed((4,), (4,), Replicate())) is None
    mesh, dims = shards.sharding_of(placed((4, 4), (4, 2), Replicate(), Shard(1), mesh=(2, 2), coordinate=(0, 0)))
    assert (mesh.size(1), dims) == (2, (1,))


@pytest.mark.parametrize("gradient", ["plain", "elsewhere", "partial"])
def test_a_gradient_that_is_not_placed_as_its_parameter_is_refused(mesh, gradient):
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    optimizer = AdamW([param], backend="eager")
    optimizer.step()
    before = param.full_tensor().clone()
    other = {
        "plain": torch.ones(4, 2),
        "elsewhere": distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)]),
        "partial": DTensor.from_local(torch.ones(4, 2), mesh, [Partial()]),
    }[gradient]
    with mock.patch.object(type(param), "grad", other), pytest.raises(ValueError, match="parameter 0 is placed as"):
        optimizer.step()
    assert torch.equal(param.full_tensor(), before)
