"""`check_replicas` on four ranks: equal ones pass, and one bit elsewhere on one rank is named on all of them."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.optim import AdamW
from hf_lowprec.reduction import check_replicas
from tests.support.processes.ranks import on_ranks

RANKS = 4


def trained(sharded_over: tuple[int, ...] = ()) -> tuple[nn.Module, AdamW]:
    """A model after a step, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3))
    model[0].bfloat16()
    model[2].bfloat16()
    if sharded_over:
        mesh = init_device_mesh("cpu", sharded_over, mesh_dim_names=("replicas", "shards")[-len(sharded_over) :])
        for module in model:
            fully_shard(module, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=0.1, backend="eager")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def difference(model: nn.Module, optimizer: object = None) -> str:
    try:
        check_replicas(model, optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Change one bit of this rank's part of the tensor; the same call changes it back."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    pattern = {2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    flat = local.detach().view(-1).view(pattern)
    flat[element] ^= torch.tensor(1 << bit).to(pattern)


def check_equal_ones_pass() -> None:
    model, optimizer = trained()
    assert not difference(model)
    assert not difference(model, optimizer)
    assert not difference(DistributedDataParallel(model), optimizer)
    with torch.no_grad():
        model[0].bias.fill_(torch.nan)
    assert not difference(model, optimizer)


def check_one_bit() -> None:
    model, optimizer = trained()
    wrapped = Accelerator(cpu=True).prepare(optimizer)
    assert isinstance(wrapped, AcceleratedOptimizer)
    states = optimizer.state[model[2].weight]
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(states), states
    named = {"0.weight": model[0].weight, "1.bias": model[1].bias, "2.bias": model[2].bias}
    named |= {f"2.weight ({key})": value for key, value in states.items()}
    count = len(list(model.parameters())) + sum(map(len, optimizer.state.values()))
    for number, (name, tensor) in enumerate(named.items()):
        wrong = number % RANKS
        element, bit = tensor.numel() - 1, [0, 15, 7, 3][number % 4]
        if dist.get_rank() == wrong:
            flip(tensor, element, bit)
        found = difference(model, wrapped)
        differ = "1, 2, 3" if wrong == 0 else str(wrong)
        assert f"{name} on rank {differ} differs from that on rank 0" in found, (name, found)
        assert f"(1 of {count} tensors differ)" in found, found
        if "(" in name:
            assert not difference(model), "without the optimizer, its states are not compared"
        if dist.get_rank() == wrong:
            flip(tensor, element, bit)
        assert not difference(model, optimizer)


def check_settings() -> None:
    """They are compared also where no weights are: under FSDP2, ranks would step their shards differently."""
    for sharded_over in ((), (4,), (2, 2)):
        model, optimizer = trained(sharded_over)
        assert not difference(model, optimizer)
        if dist.get_rank() == 2:
            optimizer.param_groups[0]["lr"] = 0.2
        found = difference(model, optimizer)
        assert "param_groups[0]['lr'] is 0.2 on rank 2 and 0.1 on ranks 0, 1, 3" in found, found
        assert not difference(model), "without the optimizer, its settings are not compared"


def check_several() -> None:
    """The first tensor is named, with all ranks on which it differs."""
    model, optimizer = trained()
    if dist.get_rank() in (1, 3):
        flip(model[1].weight, 2, 30)
    if dist.get_rank() == 2:
        flip(model[2].weight, 0, 0)
    found = difference(model, optimizer)
    assert "1.weight on rank 1, 3 differs from that on rank 0" in found, found
    assert "(2 of " in found, found


def check_a_state_that_one_rank_lacks() -> None:
    model, optimizer = trained()
    if dist.get_rank() == 2:
        del optimizer.state[model[1].weight]["exp_avg"]
    assert "1.weight (exp_avg) is not on every rank" in difference(model, optimizer)


def check_shards_without_replicas() -> None:
    """Ranks hold different parts, and there is nothing to compare; not even what only one of them has."""
    model, optimizer = trained((4,))
    assert not difference(model, optimizer)
    if dist.get_rank() == 1:
        flip(model[0].weight, 0, 3)
    assert not difference(model, optimizer)


def check_replicas_of_shards() -> None:
    """Ranks 0 and 2 hold the same, and 1 and 3; the others do not notice."""
    rank = dist.get_rank()
    model, optimizer = trained((2, 2))
    assert not difference(model, optimizer)
    average = optimizer.state[model[1].weight]["exp_avg"]
    for name, tensor in {"0.weight": model[0].weight, "1.weight (exp_avg)": average}.items():
        for wrong in (2, 1):
            if rank == wrong:
                flip(tensor, 0, 4)
            found = difference(model, optimizer)
            pair = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}[rank]
            wanted = f"{name} on rank {pair[1]} differs from that on rank {pair[0]}" if wrong in pair else ""
            assert (wanted in found) if wanted else not found, (rank, name, wrong, found)
            if rank == wrong:
                flip(tensor, 0, 4)
    assert not difference(model, optimizer)


def check_a_parameter_outside_of_the_shards() -> None:
    """Replicated over all ranks, alongside a sharded model."""
    model, _ = trained((4,))
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    assert not difference(model)
    if dist.get_rank() == 3:
        flip(model.scale, 1, 0)
    assert "scale on rank 3 differs from that on rank 0 (1 of 1 tensors differ)" in difference(model)


def check_what_fsdp2_ignores() -> None:
    """A parameter of each rank's own in a model that is sharded; and what DDP ignores, with or without its wrapper."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(rank)
    fully_shard(model, ignored_params={model[1].weight, model[1].bias})
    assert not isinstance(model[1].weight, DTensor)
    assert not difference(model)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(rank)
    assert "1.weight" in difference(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    assert not difference(model)
    assert not difference(DistributedDataParallel(model))


@pytest.mark.slow
@pytest.mark.distributed
def test_one_bit_on_one_rank_is_named_on_all():
    on_ranks(check, RANKS)


def check() -> None:
    dist.init_process_group("gloo")
    for name, each in list(globals().items()):
        if name.startswith("check_") and name != "check_replicas":
            each()
