"""Some ranks train and save, fewer or more load that, train and save, at last one: the bits are those of one process.

"dcp" is torch.distributed.checkpoint, "full" a file with full tensors.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_lowprec.optim import AdamW
from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import on_ranks
from tests.support.processes.shards import gathered

WORLDS = (4, 2, 3, 1) if EVERY_CASE else (3, 2, 1)
STEPS = 2
"""Of each world."""
SHAPES = [(7, 64), (5, 3, 32), (2, 96), (10,), (3, 33)]
"""Uneven shards, some of them empty on three and on four ranks; three whose states can be in 8 bits."""
GROUPS = [
    {"rounding": rounding, "state_dtype": state_dtype}
    for rounding in ("split", "kahan", "stochastic")
    for state_dtype in (torch.int8, torch.bfloat16)
]


def build(mesh: DeviceMesh) -> tuple[nn.ParameterList, AdamW]:
    model = nn.ParameterList()
    for k, shape in enumerate(SHAPES * len(GROUPS)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(k)).bfloat16()
        model.append(nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    params = list(model)
    count = len(SHAPES)
    groups = [{"params": params[count * k : count * (k + 1)], **group} for k, group in enumerate(GROUPS)]
    return model, AdamW(groups, lr=1e-2, backend="eager")


def train(model: nn.ParameterList, optimizer: AdamW, mesh: DeviceMesh, steps: range) -> None:
    for step in steps:
        for k, param in enumerate(model):
            generator = torch.Generator().manual_seed(100 * step + k)
            grad = torch.randn(param.shape, generator=generator) * 10.0 ** -(step + k % len(SHAPES))
            param.grad = distribute_tensor(grad.bfloat16(), mesh, [Shard(0)])
        optimizer.step()


def load(model: nn.ParameterList, optimizer: AdamW, format: str, path: Path) -> None:
    options = StateDictOptions(full_state_dict=format == "full")
    if format == "dcp":
        weights, states = get_state_dict(model, optimizer, options=options)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    else:
        weights, states = torch.load(path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


def save(model: nn.ParameterList, optimizer: AdamW, format: str, path: Path) -> None:
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=format == "full"))
    if format == "dcp":
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    elif dist.get_rank() == 0:
        torch.save([weights, states], path)


def check(format: str, path: str) -> None:
    """Load, train and save on a world of this size; on the last one, compare."""
    dist.init_process_group("gloo")
    folder, ranks = Path(path), dist.get_world_size()
    stage = WORLDS.index(ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model, optimizer = build(mesh)
    if stage > 0:
        load(model, optimizer, format, folder / str(WORLDS[stage - 1]))
    train(model, optimizer, mesh, range(STEPS * stage, STEPS * (stage + 1)))
    if ranks > 1:
        save(model, optimizer, format, folder / str(ranks))
        return
    whole, reference = build(mesh)
    train(whole, reference, mesh, range(STEPS * len(WORLDS)))
    for number, (param, expected) in enumerate(zip(model, whole, strict=True)):
        group = GROUPS[number // len(SHAPES)]
        case = (number, tuple(param.shape), group)
        assert torch.equal(gathered(param), gathered(expected)), case
        found, states = optimizer.state[param], reference.state[expected]
        assert found.keys() == states.keys(), case
        in_8_bits = group["state_dtype"] == torch.int8 and param.dim() > 1 and param.shape[-1] % 32 == 0
        assert ("exp_avg_code" in found) == in_8_bits, case
        for name, state in states.items():
            assert found[name].dtype == state.dtype, (name, *case)
            assert torch.equal(gathered(found[name]), gathered(state)), (name, *case)


@pytest.mark.distributed
@pytest.mark.parametrize("format", ["dcp", pytest.param("full", marks=pytest.mark.every_case)])
def test_other_numbers_of_ranks_go_on(format, tmp_path):
    for ranks in WORLDS:
        on_ranks(check, ranks, format, tmp_path)
