"""The checks. Each does what training does, returns a line on what it found, and raises if that is not right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import Tensor
from transformers import Trainer

from hf_lowprec.cli.doctor.layers import probes
from hf_lowprec.cli.doctor.training import STEPS, arguments, trained
from hf_lowprec.insight.layer_probes import workarounds
from hf_lowprec.integrations.transformers.callback import LOST_UPDATES
from hf_lowprec.optim import ALGORITHMS, AdamW
from hf_lowprec.optim.backends.c_compiler import CompilerError
from hf_lowprec.optim.backends.triton import TritonError
from hf_lowprec.optim.registry import OPTIMIZER_NAMES
from hf_lowprec.reduction import BucketMeans, check_replicas
from hf_lowprec.rounding import MODES

OK, MISSING, FAILED = "ok", "-", "FAILED"
LAUNCH = "accelerate launch -m hf_lowprec doctor, without GPUs torchrun --nproc-per-node 2 -m hf_lowprec doctor"
_SHOWN = ("torch", "transformers", "accelerate")


class Finding(NamedTuple):
    """What a check found.

    Attributes:
        status: one of the three above.
        text: a line.
        unexpected: whether the check ended where it was, while other ranks may wait for this one.
    """

    status: str
    text: str
    unexpected: bool = False


class Missing(Exception):
    """Something is not there, and all works without it."""


class Broken(Exception):
    """Something is there and does not do what it should."""


def finding(check: Callable[[], str]) -> Finding:
    """Run a check; whatever it raises is what it found."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Finding(OK, check())
    except Missing as reason:
        return Finding(MISSING, " ".join(str(reason).split()))
    except Broken as reason:
        return Finding(FAILED, str(reason))
    except Exception as error:
        return Finding(FAILED, " ".join(f"{type(error).__name__}: {error}".split()), unexpected=True)


def packages() -> str:
    """That what is installed is what the package's metadata asks for."""
    try:
        asked = [Requirement(line) for line in metadata.requires("hf-lowprec") or []]
    except metadata.PackageNotFoundError:
        raise Missing(
            "hf_lowprec is not installed but runs from a folder, so it is not known what it asks for"
        ) from None
    needed = [
        requirement for requirement in asked if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    ]
    wrong = [
        f"{requirement.name} {metadata.version(requirement.name)} is installed, {requirement} is asked for"
        for requirement in needed
        if not requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    ]
    if wrong:
        raise Broken("; ".join(wrong))
    return ", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN)


def names() -> str:
    """That `TrainingArguments` takes every name of ours and Trainer finds our class behind it."""
    for name in OPTIMIZER_NAMES:
        cls, _ = Trainer.get_optimizer_cls_and_kwargs(arguments(optim=name))
        if cls not in ALGORITHMS.values():
            raise Broken(f"optim={name!r} leads to {cls}, not to an optimizer of hf_lowprec")
    return f"{len(OPTIMIZER_NAMES)} values of optim= lead to our optimizers"


def steps() -> str:
    """That the compiled steps of every device are the reference's, bit for bit."""
    return "; ".join(map(_device_steps, _devices()))


def _devices() -> list[torch.device]:
    """This process's own, if it has been given one, else all there are."""
    own = arguments().device
    if own.type == "cpu":
        own = torch.device("cpu")
    gpus = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
    return [own] if dist.is_initialized() else [torch.device("cpu"), *gpus]


def _device_steps(device: torch.device) -> str:
    backend = "native" if device.type == "cpu" else "triton"
    for mode in MODES:
        try:
            compiled = _stepped(device, mode, backend)
        except (CompilerError, TritonError) as error:
            raise Missing(f"{device} takes the slower 'eager' backend, with the same results: {error}") from None
        if not all(map(torch.equal, compiled, _stepped(device, mode, "eager"))):
            raise Broken(f"{device}: backend {backend!r} with rounding={mode!r} does not give the bits of 'eager'")
    return f"{device}: backend {backend!r} gives the bits of 'eager' ({', '.join(MODES)})"


def _stepped(device: torch.device, mode: str, backend: str) -> list[Tensor]:
    """The bits of weights and states after three steps on a matrix and an FP32 norm."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(257, 33, generator=draw).bfloat16(), torch.ones(33)]
    params = [torch.nn.Parameter(weight.to(device)) for weight in weights]
    for param in params:
        param.grad = torch.randn(param.shape, generator=draw).to(param)
    optimizer = AdamW(params, rounding=mode, backend=backend)
    for _ in range(3):
        optimizer.step()
    tensors = [*params, *(value for state in optimizer.state.values() for value in state.values())]
    return [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]


def layers() -> str:
    """Every kind of layer matches FP64 in BF16, forward and backward, up to rounding."""
    return "; ".join(map(_device_layers, _devices()))


def _device_layers(device: torch.device) -> str:
    found, unsupported = probes(device)
    broken = [probe for probe in found if probe.broken]
    missing = f"; not supported in BF16: {'; '.join(unsupported)}" if unsupported else ""
    if broken:
        raise Broken(
            f"{device}: wrong in BF16: {'; '.join(map(str, broken))}. Not a fault of your model. "
            f"Workarounds: {workarounds(device)}{missing}"
        )
    if not found:
        raise Missing(f"{device}{missing.removeprefix(';')}")
    worst = max(error for probe in found for error in probe.errors.values())
    checked = f"{len(found)} convolutions, matmuls, norms … within {worst:.1%} of FP64, forward and backward"
    return f"{device}: {checked}{missing}"


def reduction() -> str:
    """That a gradient's mean over ranks is the FP32 one, and the same on all."""
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        raise Missing(f"one process; to check it between several: {LAUNCH}")
    ranks, device = group.size(), arguments().device
    gradient = torch.randn(10_007, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16().to(device)
    every = [torch.empty_like(gradient) for _ in range(ranks)]
    dist.all_gather(every, gradient)
    exact = torch.stack(every).double()

    BucketMeans(group)(gradient, is_first=True, is_last=True).wait()
    dist.all_gather(every, gradient)  # before anything is judged, so that no rank waits for one that has given up
    # Half a unit in the last place of the result, and for every addition one of FP32 of the terms.
    bound = exact.mean(0).abs() * 2**-8 + exact.abs().sum(0) * ranks * 2**-24
    if not all(torch.equal(other, gradient) for other in every):
        raise Broken(f"means over {ranks} ranks differ from rank to rank")
    if ((gradient.double() - exact.mean(0)).abs() > bound).any():
        raise Broken(f"means over {ranks} ranks are not those of an FP32 sum")
    return f"{ranks} ranks over {dist.get_backend()}: FP32 means of BF16 gradients, the same on all"


def training() -> str:
    """That the stock Trainer trains with one of our names: formats are right, every tensor moves, the loss falls."""
    if not dist.is_initialized() and (gpus := arguments().n_gpu) > 1:
        raise Missing(f"one process and {gpus} GPUs; CUDA_VISIBLE_DEVICES=0 for one of them, for all: {LAUNCH}")
    trainer, before = trained()
    if dist.is_initialized() and trainer.args.world_size != dist.get_world_size():
        raise Broken(
            f"{dist.get_world_size()} processes were started, and Trainer trains with {trainer.args.world_size}"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    try:
        check_replicas(model, trainer.optimizer)
    except RuntimeError as error:  # on every rank
        raise Broken(str(error)) from error
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    wrong = [name for name, dtype in dtypes.items() if (dtype == torch.float32) != ("norm" in name)]
    still = [
        name
        for name, param in model.named_parameters()
        if torch.equal(param.detach().cpu().float(), before[name].float())
    ]
    if wrong or still:
        raise Broken(f"dtypes that were not expected: {wrong or 'none'}; weights that did not move: {still or 'none'}")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    first, last = logs[0]["loss"], logs[-1]["loss"]
    if not last < first:
        raise Broken(f"after {STEPS} steps of a tiny Llama the loss is {last:.2f}, from {first:.2f}")
    lost = round(logs[-1][LOST_UPDATES], 3) + 0.0  # no minus before a zero
    where = f"on {trainer.args.device}, world of {trainer.args.world_size}"
    return f"{STEPS} steps {where}: loss {first:.2f} to {last:.2f}, {lost:.1%} of the last update lost"


CHECKS: dict[str, Callable[[], str]] = {
    "packages": packages,
    "names": names,
    "steps": steps,
    "layers": layers,
    "reduction": reduction,
    "training": training,
}
