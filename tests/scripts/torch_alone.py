"""What works where only torch is installed, on one process and then on two ranks; the rest says what it needs."""

import os
import re
import sys
import tempfile
from importlib.machinery import PathFinder

ABSENT = {"transformers", "accelerate", "safetensors", "packaging", "typer", "rich", "numpy", "peft", "datasets"}


found = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, *args: None if name.partition(".")[0] in ABSENT else found(name, *args)
)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import hf_lowprec  # noqa: E402
from hf_lowprec.reduction import reduce_in_fp32, reduce_scatter_in_fp32  # noqa: E402

NOT_IN_THE_CORE = ("LowPrecisionCallback", "save_pretrained", "export_checkpoint", "prepare_accelerator")


def model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 11))


def train(name):
    """Take ten steps with the optimizer that `optim=name` stands for, measured and averaged."""
    network, tokens = model(), torch.arange(22).remainder(11).view(2, 11)
    hf_lowprec.cast_model(network)
    dtypes = {name: param.dtype for name, param in network.named_parameters()}
    assert dtypes["0.weight"] == torch.bfloat16
    assert dtypes["1.layers.0.norm1.weight"] == torch.float32
    rate = {"lr": 1.0, "d0": 1e-3} if name.startswith("prodigy") else {"lr": 1e-3}  # d0 is the first rate
    cls, kwargs = hf_lowprec.optimizer_factory(name, **rate)
    if cls is hf_lowprec.Muon:
        kwargs["matrices"] = hf_lowprec.hidden_matrices(network)
    optimizer = cls(network.parameters(), **kwargs)
    monitor, average, losses = hf_lowprec.PrecisionMonitor(optimizer, network), hf_lowprec.AveragedModel(network), []
    for _ in range(10):
        loss = nn.functional.cross_entropy(network(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        monitor.measure_next_step()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(network, optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert monitor.last.by_kind["all"]["lost_updates"] < 0.2
    assert {tensor.dtype for tensor in hf_lowprec.fp32_state_dict(network, optimizer).values()} == {torch.float32}


def sum_gradients(rank, folder):
    """Under DDP and FSDP2, a gradient is the mean over ranks, summed in FP32 and rounded once."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(64, 8, generator=generator).bfloat16() for _ in range(2)]
    expected = ((factors[0].double() + factors[1].double()) / 2).bfloat16()  # exact before it is rounded
    for shard in (False, True):
        linear = nn.Linear(8, 64, bias=False, dtype=torch.bfloat16)
        if shard:
            network = fully_shard(linear)
            reduce_scatter_in_fp32(network)
        else:
            network = DistributedDataParallel(linear)
            reduce_in_fp32(network)
        (network(torch.eye(8, dtype=torch.bfloat16)) * factors[rank].T).sum().backward()
        gradient = linear.weight.grad.to_local() if shard else linear.weight.grad
        rows = slice(rank * 32, rank * 32 + 32) if shard else slice(None)
        assert torch.equal(gradient, expected[rows]), (shard, gradient - expected[rows])
        hf_lowprec.AdamW(network.parameters(), lr=1e-3, rounding="split").step()
    dist.barrier()
    os._exit(0)


def main():
    torch.set_num_threads(1)  # a fork has only the thread that called it
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(sum_gradients, (folder,), nprocs=2, start_method="fork")
    for name in sys.argv[1:]:
        train(name)
    for name in NOT_IN_THE_CORE:
        try:
            getattr(hf_lowprec, name)
        except ImportError as error:
            pattern = rf"hf_lowprec\.{name} needs (transformers|accelerate|safetensors), .*: pip install "
            assert re.match(pattern, str(error)), error
        else:
            raise AssertionError(name)
    assert not ABSENT & {name.partition(".")[0] for name in sys.modules}
    print("done")


if __name__ == "__main__":
    main()
