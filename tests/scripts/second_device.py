"""The package on a second device, whose memory is on the host: the CPU's bits, and no operation on tensors of both.

python second_device.py CHECK
"""

import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

import hf_lowprec
from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.optim import AdamW, host_steps
from hf_lowprec.optim.gradients import buckets
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.state.fp32_weights import fp32_state_dict, keep_low_bits
from hf_lowprec.reduction import GradientAccumulator, reduce_in_fp32, reduce_scatter_in_fp32
from hf_lowprec.reduction.compare_ranks import checksum
from tests.support.chosen_cases import EVERY_CASE, one_in_turn
from tests.support.optim.every_optimizer import CONFIGURATIONS, MODES, NAMES, OPTIONS, build, parameters
from tests.support.optim.optimizer_contents import assert_equal, everything, train
from tests.support.second_device import host_device
from tests.support.training.tiny_trainer import trained

CPU, DEVICE, META = torch.device("cpu"), host_device.register(), torch.device("meta")
BF16, FP32 = torch.bfloat16, torch.float32
ALL_MODES = [mode for dtype, mode in MODES if dtype == BF16]
DELAYED = {"gradient_release": True, "clip": "delayed", "max_grad_norm": 0.01}
PLACES = ((CPU, ""), (DEVICE, ""), (DEVICE, "states"), (DEVICE, "all"))
"""Where weights are, and what is in the memory of the host all the same, see `on_host`."""


def same(run: Callable[..., Any], places: Iterable[Any], *case: Any) -> None:
    """Assert that `run(place, *case)` returns the same at all places."""
    results = [tree_map_only(Tensor, lambda t: t.detach().to(CPU, copy=True), run(place, *case)) for place in places]
    for other in results[1:]:
        assert_equal(other, results[0], str(case))


def normal(param: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(param.shape, generator=generator, dtype=FP32, device=CPU).to(param.device, param.dtype)


def on_host(what: str) -> dict[str, bool]:
    """Arguments that put "states", or "all" of states and gradients, on the host; "" puts nothing there."""
    return {"offload_states": bool(what), "offload_gradients": what == "all"}


def network(device: torch.device, dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 32)]
    return nn.Sequential(*layers).to(dtype).to(device)


def backward(model: nn.Module, seed: int) -> None:
    """Gradients that do not depend on how a device multiplies matrices."""
    sum((param * normal(param, seed)).sum(dtype=FP32) for param in model.parameters()).backward()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int] = range(4)) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def mixtures() -> None:
    """The device itself: it refuses what a GPU refuses, and takes what a GPU takes."""
    here, there, first = torch.ones(2, 2), torch.ones(2, 2, device=DEVICE), torch.tensor([0])
    for mixed in (
        lambda: here + there,
        lambda: there @ here,
        lambda: torch.cat([here, there]),
        lambda: torch.equal(here, there),
        lambda: torch.where(there > 0, there, here),
        lambda: here[0, 0].add_(there[0, 0]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    there[first] = there.copy_(here)[first] * here.sum()
    assert there.tolist() == [[4, 4], [1, 1]]


def algorithms() -> None:
    """Every algorithm in every mode, measured; also of a model that is divided among the devices."""

    def run(devices: Any, name: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
        params = [nn.Parameter(param.to(devices[k % 2])) for k, param in enumerate(parameters(dtype))]
        optimizer = build(name, params, backend="eager", **options)
        monitor = PrecisionMonitor(optimizer, every=1)
        train(optimizer, 3)
        return everything(optimizer), optimizer.grad_norm, monitor.last.by_kind

    clipped = [(name, BF16, {"max_grad_norm": 0.5, "skip_nonfinite": True}) for name in NAMES]
    for case in (*CONFIGURATIONS, *clipped):
        same(run, ((CPU, CPU), (DEVICE, DEVICE), (CPU, DEVICE)), *case)


def steps() -> None:
    """Options of the step, in a backward pass as well, and gradients of micro-batches."""

    def run(device: torch.device, options: dict[str, Any]) -> Any:
        model = network(device)
        optimizer = AdamW(model.parameters(), lr=0.01, backend="eager", **options)
        learn(model, optimizer)
        norms = [optimizer.grad_norm]
        if not optimizer.gradient_release:
            accumulator = GradientAccumulator(model)
            for micro_batch in range(3):
                with accumulator.active():
                    backward(model, micro_batch)
            norms.append(optimizer.clip_grad_norm_(0.5))
            optimizer.step()
            assert all(norm is None or norm.device == device for norm in norms)
        if optimizer.skip_nonfinite:
            model[0].weight.grad[0] = torch.nan
            optimizer.step()
            assert optimizer.skipped_steps == 1
        return everything(optimizer), norms

    for options in ({"max_grad_norm": 0.01}, {"skip_nonfinite": True}, {"gradient_release": True}, DELAYED):
        same(run, (CPU, DEVICE), options)


def offload() -> None:
    """States on the host, or gradients as well, in several buckets. Then weights are read, and the mode changes."""
    host_steps.BUCKET_ELEMENTS = buckets.BUCKET_ELEMENTS = 700

    def run(device: torch.device, name: str, options: dict[str, Any], what: str) -> Any:
        model = network(device)
        where = "" if device == CPU else "states" if options.get("gradient_release") else what
        optimizer = build(name, model.parameters(), lr=0.01, **on_host(where), **options)
        learn(model, optimizer)
        for micro_batch in range(3):
            backward(model, micro_batch)
            if options.get("gradient_release"):
                optimizer.step()
        norm = None if options.get("gradient_release") else optimizer.clip_grad_norm_(0.5)
        assert norm is None or norm.device == device
        optimizer.step()
        optimizer.zero_grad()
        of_states = [(key, value.device) for state in optimizer.state.values() for key, value in state.items()]
        assert all(device == CPU or key == "step" for key, device in of_states)
        weights = fp32_state_dict(model, optimizer)
        if name == "ScheduleFreeAdamW":
            optimizer.eval()
            optimizer.train()
        optimizer.param_groups[0]["rounding"] = "split" if options.get("rounding") == "kahan" else "kahan"
        learn(model, optimizer, range(4, 6))
        return everything(optimizer), weights, norm

    cases = [(name, OPTIONS[name][0] | mode) for name in ("AdamW", "ScheduleFreeAdamW") for mode in ALL_MODES]
    cases += [("AdamW", {"max_grad_norm": 0.01, "skip_nonfinite": True}), ("AdamW", DELAYED)]
    for number, case in enumerate(cases):
        for what in one_in_turn(("states", "all"), number):
            same(run, (CPU, DEVICE), *case, what)


def checkpoints() -> None:
    """Saved at each place and loaded at each, in the same mode or another; the next optimizer takes the low bits."""

    def make(place: Any, **options: Any) -> tuple[nn.Module, AdamW]:
        model = network(place[0])
        return model, AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **on_host(place[1]), **options)

    def run(places: Any, saved: str, loaded: str, state_dtype: torch.dtype | None) -> Any:
        model, optimizer = make(places[0], rounding=saved, state_dtype=state_dtype)
        learn(model, optimizer)
        other, resumed = make(places[1], rounding=loaded, state_dtype=state_dtype)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        learn(other, resumed, range(4, 6))
        weights, before = fp32_state_dict(other, resumed), everything(resumed)
        keep_low_bits(resumed)
        last = AdamW(other.parameters(), lr=0.01, offload_states=places[1] == (DEVICE, ""))
        learn(other, last, range(6, 8))
        return weights, before, everything(last)

    pairs = [(source, target) for source in PLACES[:3] for target in PLACES[:3]]
    modes = [("kahan", "kahan"), ("split", "kahan"), ("kahan", "nearest"), ("stochastic", "split")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # they say what changes
        for (saved, loaded), state_dtype in itertools.product(modes, (None, torch.int8)):
            same(run, pairs, saved, loaded, state_dtype)


def monitors() -> None:
    """What is measured, with states and gradients on the host or not, also of an optimizer of torch."""

    def run(place: Any, options: dict[str, Any]) -> Any:
        model = network(place[0])
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if "of torch" not in options:
            what = "states" if place[1] and options.get("gradient_release") else place[1]
            optimizer = AdamW(model.parameters(), backend="eager", **on_host(what), **options)
        monitor = PrecisionMonitor(optimizer, model, every=1)
        learn(model, optimizer)
        optimizer.param_groups[0]["rounding"] = "kahan"
        learn(model, optimizer, range(4, 6))
        return monitor.last.by_kind, monitor.last.by_tensor, list(map(str, monitor.findings()))

    for options in (*ALL_MODES, {"max_grad_norm": 0.01, "skip_nonfinite": True}, DELAYED, {"of torch": True}):
        same(run, PLACES, options)


def casting() -> None:
    """A model that is cast where it is trained, or elsewhere; its low bits, averages and checksums."""

    def run(devices: Any) -> Any:
        cast_on, trained_on, averaged_on = devices
        model = network(cast_on, FP32)
        hf_lowprec.cast_model(model)
        model.to(trained_on)
        optimizer = AdamW(model.parameters(), lr=0.01, rounding="split")
        average = hf_lowprec.AveragedModel(model, averaged_on, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        first = fp32_state_dict(model, optimizer)
        for step in range(3):
            learn(model, optimizer, [step])
            average.update_parameters(model, optimizer)
        assert model(torch.ones(2, 32, device=trained_on)).device == trained_on
        checksums = list(map(checksum, model.parameters()))
        return everything(optimizer), first, fp32_state_dict(model, optimizer), dict(average.state_dict()), checksums

    same(run, ((CPU, CPU, CPU), (DEVICE, DEVICE, DEVICE), (CPU, DEVICE, CPU), (DEVICE, CPU, DEVICE)))


def default_device() -> None:
    """What the package makes for itself is as it needs it, whatever device and dtype new tensors have by default."""

    def run(
        defaults: tuple[torch.device, torch.dtype], device: torch.device, name: str, options: dict[str, Any]
    ) -> Any:
        model = network(device, FP32)
        hf_lowprec.cast_model(model)
        torch.set_default_dtype(defaults[1])
        with torch.device(defaults[0]):
            optimizer = build(name, model.parameters(), backend="eager", **options)
            monitor = PrecisionMonitor(optimizer, model, every=1)
            learn(model, optimizer)
            result = everything(optimizer), fp32_state_dict(model, optimizer), monitor.last.by_kind
        torch.set_default_dtype(FP32)
        return result

    options = {"max_grad_norm": 0.1}, {"rounding": "split", "skip_nonfinite": True}
    for case in itertools.product((CPU, DEVICE), NAMES, options):
        same(run, ((CPU, FP32), (CPU, BF16), (META, FP32)), *case)


def sharded() -> None:
    """DTensors, FSDP2 and DDP, whose collectives send nothing."""
    dist.init_process_group(f"cpu:fake,{DEVICE.type}:fake", store=FakeStore(), rank=0, world_size=2)
    send, receive = dist.batch_isend_irecv, dist.irecv

    def receive_zeros(operations: list[dist.P2POp]) -> Any:  # nothing is received in memory that is not initialized
        for each in operations:
            if each.op is receive:
                each.tensor.zero_()
        return send(operations)

    dist.batch_isend_irecv = receive_zeros

    def run(devices: Any, name: str) -> Any:
        device, default = devices
        mesh = init_device_mesh(device.type, (2,))
        plain = [param.detach().to(device) for param in parameters(shapes=((64, 32), (32, 64), (8,)))]
        places = [Shard(0)], [Shard(1)], [Shard(0)]
        with torch.device(default):
            params = [nn.Parameter(distribute_tensor(*each)) for each in zip(plain, [mesh] * 3, places, strict=True)]
            optimizer = build(name, params, backend="eager", max_grad_norm=0.5)
            monitor = PrecisionMonitor(optimizer, every=1)
            for seed in range(3):
                for param, whole, place in zip(params, plain, places, strict=True):
                    param.grad = distribute_tensor(normal(whole, seed), mesh, place)
                optimizer.step()
        weights = fp32_state_dict(nn.ParameterList(params), optimizer).values()
        states = (value for state in optimizer.state.values() for value in state.values())
        return list(map(local_shard, [*params, *weights, *states])), monitor.last.by_kind

    for name in NAMES if EVERY_CASE else ("Adafactor", "AdamW", "Muon", "Prodigy"):
        same(run, ((CPU, CPU), (DEVICE, CPU), (DEVICE, DEVICE)), name)
    replicas, shards = DistributedDataParallel(network(DEVICE)), network(DEVICE)
    reduce_in_fp32(replicas)
    reduce_scatter_in_fp32(fully_shard(shards, mesh=init_device_mesh(DEVICE.type, (2,))))
    for model in (replicas, shards):
        for what in ("", "states", "all"):
            optimizer = AdamW(model.parameters(), max_grad_norm=0.1, **on_host(what))
            for _ in range(2):
                model(torch.ones(8, 32, dtype=BF16, device=DEVICE)).float().square().mean().backward()
                optimizer.step()
            devices = {state["exp_avg"].device for state in optimizer.state.values()}
            assert devices == {CPU if what else DEVICE}
            fp32_state_dict(model, optimizer)
            del optimizer


def trainer() -> None:
    """Trainer on the device: with states on the host, and resumed, it is the same run, and is measured alike."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)
    settings = {
        "optim": "adamw_bf16_split",
        "max_steps": 6,
        "logging_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
    }

    def run(place: tuple[str, str | None, bool], folder: str) -> Any:
        name, earlier, offloaded = place
        resume = earlier and f"{folder}/{earlier}/checkpoint-3"
        options = f"gradient_release=True,clip=delayed,offload_states={offloaded}"
        result = trained(f"{folder}/{name}", resume=resume, optim_args=options, use_cpu=False, **settings)
        (log,) = (entry for entry in result.state.log_history if "loss" in entry)
        assert result.model.device == DEVICE and "lost_updates" in log
        return list(result.model.parameters()), log["lost_updates"], log["grad_norm"]

    with tempfile.TemporaryDirectory() as folder:
        same(run, (("device", None, False), ("host", None, True), ("resumed", "device", True)), folder)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
