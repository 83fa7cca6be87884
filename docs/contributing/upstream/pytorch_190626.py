"""Measure the error that BF16 sums over the tensor-parallel mesh add to gradients, and print a table.

The weight of an RMSNorm under `SequenceParallel` is replicated over the TP mesh, and each rank has a part of its
gradient. FSDP2, with `MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)`, sums the parts: as torch does
it, and after an upcast to `reduce_dtype`, as #190627 proposes. Errors are relative, in the Euclidean norm.

    python pytorch_190626.py [RANKS ...]  # as many processes over gloo, on CPUs
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, FEATURES = 2048, 1024


def gradients(mesh, inputs, upstream, upcast):
    """The gradient that FSDP2 computes of the norm's weight, and this rank's part of it before the sum."""
    parts, original = [], FSDPParam._get_grad_inner_tensor

    def recording(self, grad):
        parts.append(grad.to_local().clone())
        return original(self, grad.to(self.reduce_dtype) if upcast else grad)

    model = nn.Sequential(nn.RMSNorm(FEATURES))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel()})
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype=FP32))
    FSDPParam._get_grad_inner_tensor = recording
    try:
        (model(inputs.to(BF16)).to_local() * upstream.to(BF16)).sum().backward()
    finally:
        FSDPParam._get_grad_inner_tensor = original
    return model[0].weight.grad.full_tensor().double(), parts[0]


def errors(rank, ranks):
    """Errors of the sum as it is and with an upcast, then of the whole gradient in both ways."""
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    inputs, upstream = torch.randn(2, 1, TOKENS, FEATURES, generator=generator)
    normalized = nn.functional.rms_norm(inputs.double(), (FEATURES,))
    exact = (normalized * upstream).sum((0, 1))
    part = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    of_sum, of_gradient = [], []
    for upcast in (False, True):
        found, addend = gradients(mesh, inputs[:, part], upstream[:, part], upcast)
        total = addend.double()
        dist.all_reduce(total)
        of_sum.append((found - total).norm() / total.norm())
        of_gradient.append((found - exact).norm() / exact.norm())
    return *of_sum, *of_gradient


def work(rank, ranks, file):
    """One rank's process."""
    torch.set_num_threads(1)
    store = dist.FileStore(file, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = errors(rank, ranks)
    if rank == 0:
        print(f"| {ranks} | " + " | ".join(f"{error:.2%}" for error in found) + " |", flush=True)
    # Ranks end together, without destroying gloo's groups, which now and then aborts a process.
    if store.add("done", 1) == ranks:
        store.set("all done", "")
    store.wait(["all done"])
    os._exit(0)


if __name__ == "__main__":
    print("| TP ranks | sum | sum, upcast | gradient | gradient, upcast |\n|---:|---:|---:|---:|---:|", flush=True)
    for ranks in map(int, sys.argv[1:] or ("2", "4", "8")):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(work, (ranks, os.path.join(folder, "store")), ranks, start_method="fork")
