"""Train DTensors with states in 8 bits, and save or load them, on any number of gloo ranks.

reshard_8_bit_states.py save|resume dcp|full FOLDER

Prints a digest of all weights and states after the last step. "dcp" is torch.distributed.checkpoint, "full" a file with
full tensors.
"""

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_lowprec.optim import AdamW
from tests.support.processes.gathered import gathered
from tests.support.processes.ranks import leave

SHAPES = [(7, 64), (5, 3, 32), (2, 96), (10,), (3, 33)]
HALF = 2


def train(model: nn.ParameterList, optimizer: AdamW, mesh, steps: range) -> None:
    for step in steps:
        for k, param in enumerate(model):
            generator = torch.Generator().manual_seed(100 * step + k)
            grad = torch.randn(param.shape, generator=generator) * 10.0 ** -(step + k)
            param.grad = distribute_tensor(grad.bfloat16(), mesh, [Shard(0)])
        optimizer.step()


def main(task: str, format: str, folder: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.ParameterList()
    for k, shape in enumerate(SHAPES):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(k)).bfloat16()
        model.append(nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    optimizer = AdamW(model.parameters(), lr=1e-2, rounding="stochastic", state_dtype=torch.int8, backend="eager")
    path = Path(folder)
    if task == "save":
        train(model, optimizer, mesh, range(HALF))
    options = StateDictOptions(full_state_dict=format == "full")
    weights, states = get_state_dict(model, optimizer, options=options)
    if task == "save" and format == "dcp":
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    elif task == "save" and dist.get_rank() == 0:
        torch.save([weights, states], path / "full.pt")
    elif task == "resume" and format == "dcp":
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    elif task == "resume":
        weights, states = torch.load(path / "full.pt")
    if task == "resume":
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    train(model, optimizer, mesh, range(HALF, 2 * HALF))
    digest = hashlib.sha256()
    for param in model:
        state = optimizer.state[param]
        assert (state["exp_avg"].dtype == torch.int8) == (param.dim() > 1 and param.shape[-1] % 32 == 0)
        for name, tensor in sorted({"": param, **state}.items()):
            bits = gathered(tensor).detach().contiguous().view(-1).view(torch.uint8)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + bits.numpy().tobytes())
    if dist.get_rank() == 0:
        print("digest", digest.hexdigest())
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
