"""torch still has the private attributes of DTensor that steps ask for, with the meaning that they rely on."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hf_lowprec.optim.private_torch_apis import (
    at_end_of_backward_pass,
    backward_pass,
    dtensor_of_shard,
    dtensor_specs,
    local_tensors,
    without_torch_function,
)

HERE = f"torch {torch.__version__} has changed this"


def test_a_dtensor_holds_its_local_tensor(mesh):
    full, plain = torch.arange(12.0).view(4, 3), torch.ones(2)
    param = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    local, same = local_tensors([param, plain])
    assert same is plain
    assert type(local) is torch.Tensor, HERE
    assert local is local_tensors([param])[0]
    assert torch.equal(local, full), HERE
    public = param.to_local()
    assert (local.data_ptr(), local.dtype, local.shape) == (public.data_ptr(), public.dtype, public.shape), HERE
    plainly = param.data
    with torch.no_grad():  # what `to_local` promises in its comments
        assert plainly.to_local() is local_tensors([plainly])[0], HERE


def test_the_specs_of_dtensors_tell_their_placements(mesh):
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    replicated = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    specs = dtensor_specs([sharded, replicated, torch.ones(4)])
    assert specs[2] is None
    assert [spec.placements for spec in specs[:2]] == [sharded.placements, replicated.placements], HERE


def test_backward_passes_have_numbers_and_call_back_at_their_end():
    weights, calls, numbers = [torch.ones(2, requires_grad=True) for _ in range(2)], [], []

    def hook(param):
        calls.append("hook")
        if backward_pass() not in numbers:
            numbers.append(backward_pass())
            at_end_of_backward_pass(lambda: calls.append("end"))

    for weight in weights:
        weight.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        (weights[0] * weights[1]).sum().backward()
    assert calls == 2 * ["hook", "hook", "end"], HERE
    assert backward_pass() is None and len(set(numbers) - {None}) == 2, HERE


def test_a_shard_stays_on_the_host_whatever_the_device_of_its_mesh(mesh):
    """`DTensor.from_local` would move it: to a GPU, or here to the device "meta"."""
    shard, full = torch.arange(6.0).view(2, 3), torch.empty(2, 3, device="meta")
    made = dtensor_of_shard(shard, DeviceMesh("meta", [0]), (Shard(0),), full)
    assert (made.device.type, made.placements, made.shape) == ("cpu", (Shard(0),), full.shape), HERE
    assert local_tensors([made])[0].data_ptr() == shard.data_ptr(), HERE


def test_fsdp2_gives_all_gradients_of_a_parameter_the_same_spec(mesh):
    """If not, steps are right but slower: they compare placements one by one."""
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    specs = []
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        specs.append(dtensor_specs([param.grad for param in model.parameters()]))
        model.zero_grad()
    assert None not in specs[0], HERE
    assert all(first is second for first, second in zip(*specs, strict=True)), HERE


def test_what_a_dtensor_says_without_torch_functions_is_true(mesh):
    param = nn.Parameter(distribute_tensor(torch.ones(4, 3).bfloat16(), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 3).bfloat16(), mesh, [Shard(0)])
    grad = param.grad
    with without_torch_function():
        assert (param.dtype, param.shape, param.is_contiguous()) == (torch.bfloat16, (4, 3), True), HERE
        assert param.grad is grad, HERE
