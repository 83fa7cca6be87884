"""torch still has the private attributes that reductions use, with the meaning that they rely on."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.casting import cast_model
from hf_lowprec.reduction import reduce_scatter_in_fp32
from hf_lowprec.reduction.ddp import averages_gradients
from hf_lowprec.reduction.private_torch_apis import (
    comm_hook_states,
    forget_comm_hooks,
    joins_ranks,
    leave_gradients_to_hook,
    meshes_beside,
    names_ignored_by_ddp,
    parameter_groups,
    reduce_scatter_of,
    reduce_scatters,
    replicates_shards,
    set_policy,
    trained_parameters,
)

HERE = f"torch {torch.__version__} has changed this"


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_leaves_the_names_it_ignores_on_the_model():
    model = torch.nn.Linear(2, 2)
    assert list(names_ignored_by_ddp(model)) == []
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    assert list(names_ignored_by_ddp(model)) == ["bias"], HERE


def test_ddp_records_its_hooks_in_a_list(one_rank):
    """`register_comm_hook` adds to it, and an unpickled DDP, which has lost its hook, would carry it twice."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, lambda state, bucket: None)
    assert len(model._comm_hooks) == 1, HERE
    forget_comm_hooks(model)
    assert model._comm_hooks == []


def test_ddp_knows_whether_ranks_are_joined(one_rank):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert averages_gradients(weakref.ref(model)) and not joins_ranks(model), HERE
    with model.no_sync():
        assert not averages_gradients(weakref.ref(model))
    with Join([model]):
        assert joins_ranks(model) and not averages_gradients(weakref.ref(model)), HERE


def test_symmetric_memory_reaches_the_reduce_scatter_of_sums_alone(two_fake_ranks, monkeypatch):
    """For a mean, which NCCL's kernels do not compute, torch keeps the reduce-scatter that sums in BF16."""
    monkeypatch.setattr("torch.distributed._symmetric_memory.set_backend", lambda backend: None)  # it needs a GPU
    for of_sums in (False, True):
        model = fully_shard(torch.nn.Linear(5, 3, dtype=torch.bfloat16))
        model.set_force_sum_reduction_for_comms(of_sums)
        model.set_symm_mem_for_comm()
        ((summing, group, count),) = reduce_scatters(model)
        assert (type(summing).__name__ == "SymmMemReduceScatter") == of_sums, HERE
        assert (group.size(), count) == (2, 2 * 5 + 2), HERE  # three rows and three biases, over two ranks


def test_replicas_of_shards_are_told_from_tensor_parallelism(two_fake_ranks):
    """Their parameters have meshes of two dimensions alike."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    hybrid = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    parallel = parallelize_module(torch.nn.Linear(4, 4), mesh["inner"], ColwiseParallel())
    parallel = fully_shard(parallel, mesh=mesh["outer"])
    assert hybrid.weight.device_mesh.ndim == parallel.weight.device_mesh.ndim == 2
    found = [[*map(replicates_shards, parameter_groups(module))] for module in (hybrid, parallel)]
    assert found == [[True], [False]], HERE


def test_fp32_parameters_get_a_group_of_their_own(two_fake_ranks):
    """The model is cast after it was sharded, before it runs. Experts keep their divisor, which the sum applies."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    model = fully_shard(torch.nn.Sequential(fully_shard(model)))
    model[0].set_gradient_divide_factor(6.0)
    model.is_distributed_loading_by_transformers = True
    cast_model(model)
    reduce_scatter_in_fp32(model)
    groups = [group for module in (model, model[0]) for group in parameter_groups(module)]
    dtypes = [{param.dtype for param in trained_parameters(group)} for group in groups]
    assert dtypes == [{torch.float32}, {torch.bfloat16}], HERE
    for _ in range(2):  # another Trainer, or a second call: what was set is not lost
        assert [reduce_scatter_of(group).divisor for group in groups] == [6.0, 6.0], HERE
        reduce_scatter_in_fp32(model)
    model(torch.ones(2, 4).bfloat16())  # FSDP2 looks at the dtypes
    assert model[0][1].weight.dtype == torch.float32


def test_a_policy_is_replaced_before_and_after_the_first_forward_pass(two_fake_ranks):
    model = fully_shard(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    for reduce_dtype in (torch.float32, None, torch.float32):
        set_policy(model, MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        model(torch.ones(2, 4).bfloat16())
        assert [group._reduce_dtype for group in parameter_groups(model)] == [reduce_dtype], HERE


def test_the_other_dimensions_of_a_sliced_mesh_are_known(two_fake_ranks):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    assert [group.size() for group in meshes_beside(mesh["inner"])] == [2], HERE
    assert meshes_beside(mesh) == meshes_beside(init_device_mesh("cpu", (2,))) == [], HERE


def test_ddp_leaves_gradients_to_its_hook(one_rank):
    """After `leave_gradients_to_hook`, the averages stay in DDP's buckets."""
    left = []
    for leave in (False, True):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        assert comm_hook_states(model) == [], HERE

        def doubled(state, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer().mul_(2))
            return future

        model.register_comm_hook("its state", doubled)
        assert comm_hook_states(model) == ["its state"], HERE
        if leave:
            leave_gradients_to_hook(model)
        model(torch.ones(1, 2)).sum().backward()
        left.append(model.module.bias.grad.tolist())
    assert left == [[2.0, 2.0], [1.0, 1.0]], HERE
