"""The checks of `hf-lowprec doctor`. Each runs a part of training and returns one line, or raises Broken or Missing.

The last check is a training run that takes seconds, on all ranks of a launch: a tiny Llama learns to count, with the
stock Trainer.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from tempfile import gettempdir
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import hf_lowprec
from hf_lowprec.integrations.transformers.callback import LOST_UPDATES
from hf_lowprec.optim import ALGORITHMS, AdamW
from hf_lowprec.optim.backends.c.compiler import CompilerError
from hf_lowprec.optim.backends.triton.availability import TritonError
from hf_lowprec.optim.optimizer_names import OPTIMIZER_NAMES
from hf_lowprec.reduction import BucketAverager, check_replicas
from hf_lowprec.rounding import MODES

OK, MISSING, FAILED = "ok", "-", "FAILED"
LAUNCH = "accelerate launch -m hf_lowprec doctor, without GPUs torchrun --nproc-per-node 2 -m hf_lowprec doctor"
_SHOWN = ("torch", "triton", "transformers", "accelerate", "peft", "trl", "deepspeed")
_VOCABULARY, _LENGTH, _STEPS = 64, 16, 12


class CheckResult(NamedTuple):
    """The result of a check.

    Attributes:
        status: `OK`, `MISSING` or `FAILED`.
        text: one line.
        unexpected: whether an error ended the check midway, so that other ranks may wait for this one.
    """

    status: str
    text: str
    unexpected: bool = False


class Missing(Exception):
    """Raised by a check if something optional is missing: everything works without it."""

    status = MISSING


class Broken(Exception):
    """Raised by a check if something does not work as it should."""

    status = FAILED


def run_check(check: Callable[[], str]) -> CheckResult:
    """Run a check. An error that it raises becomes its result."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return CheckResult(OK, check())
    except (Missing, Broken) as reason:
        return CheckResult(reason.status, " ".join(str(reason).split()))
    except Exception as error:
        return CheckResult(FAILED, " ".join(f"{type(error).__name__}: {error}".split()), unexpected=True)


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Join the process group of an `accelerate launch` or `torchrun`, as Trainer would, and leave it at the end."""
    _ = _training_arguments().device  # reading this property starts the process group
    yield
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def abort_launch() -> NoReturn:
    """End this process, and with it the launch: other ranks may wait in a collective that this one left."""
    sys.stderr.flush()
    os._exit(1)


def show_versions() -> str:
    """Return the versions and devices that a bug report needs."""
    found = {"hf_lowprec": hf_lowprec.__version__, "Python": platform.python_version()}
    for name in _SHOWN:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    cpu = f"{torch.get_num_threads()} threads with {torch.backends.cpu.get_cpu_capability()}"
    versions = ", ".join(" ".join(pair) for pair in found.items())
    return f"{versions}; {platform.platform()}; {cpu}; {', '.join(gpus) or 'no GPU'}"


def check_packages() -> str:
    """Check that the installed packages meet the requirements in hf_lowprec's metadata, Trainer's included."""
    try:
        requirements = [Requirement(line) for line in metadata.requires("hf-lowprec") or []]
    except metadata.PackageNotFoundError:
        raise Missing("hf_lowprec runs from a folder and is not installed, so its requirements are unknown") from None
    environments = [{"extra": extra} for extra in ("trainer", "cli")]
    needed = [r for r in requirements if not r.marker or any(map(r.marker.evaluate, environments))]
    installed = {requirement.name: metadata.version(requirement.name) for requirement in needed}
    wrong = [
        f"{requirement.name} {installed[requirement.name]} is installed, but {requirement} is required"
        for requirement in needed
        if not requirement.specifier.contains(installed[requirement.name], prereleases=True)
    ]
    if wrong:
        raise Broken("; ".join(wrong))
    return f"all {len(needed)} requirements are met"


def check_names() -> str:
    """Check that `TrainingArguments` accepts each of our names and that Trainer gets our class for it."""
    for name in OPTIMIZER_NAMES:
        cls, _ = Trainer.get_optimizer_cls_and_kwargs(_training_arguments(optim=name))
        if cls not in ALGORITHMS.values():
            raise Broken(f"optim={name!r} selects {cls}, which is not an hf_lowprec optimizer")
    return f"all {len(OPTIMIZER_NAMES)} optim= names select hf_lowprec optimizers"


def check_steps() -> str:
    """Check that the compiled step of every device gives the same bits as the reference."""
    return "; ".join(map(_check_device_steps, _devices()))


def _devices() -> list[torch.device]:
    """Return the device of this rank, or all devices of this machine if there are no ranks."""
    device = _training_arguments().device
    if device.type == "cpu":
        device = torch.device("cpu")
    gpus = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
    return [device] if dist.is_initialized() else [torch.device("cpu"), *gpus]


def _check_device_steps(device: torch.device) -> str:
    """Compare the compiled backend of a device with the eager one, in every rounding mode."""
    backend = "native" if device.type == "cpu" else "triton"
    variants: dict[str, dict[str, Any]] = {f"rounding={mode!r}": {"rounding": mode} for mode in MODES}
    variants["state_dtype=torch.int8"] = {"state_dtype": torch.int8}
    for named, options in variants.items():
        try:
            compiled = _bits_after_steps(device, backend=backend, **options)
        except (CompilerError, TritonError) as error:
            raise Missing(f"{device} uses the slower 'eager' backend, with the same results: {error}") from None
        if not all(map(torch.equal, compiled, _bits_after_steps(device, backend="eager", **options))):
            raise Broken(f"{device}: backend {backend!r} with {named} gives different bits from 'eager'")
    return f"{device}: backend {backend!r} gives the same bits as 'eager' ({', '.join(MODES)}, states in 8 bits)"


def _bits_after_steps(device: torch.device, **options: Any) -> list[Tensor]:
    """Return the bytes of weights and states after three steps on an FP32 norm and two matrices, one in full blocks."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(257, columns, generator=generator).bfloat16() for columns in (33, 64)] + [torch.ones(33)]
    params = [torch.nn.Parameter(weight.to(device)) for weight in weights]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)
    optimizer = AdamW(params, **options)
    for _ in range(3):
        optimizer.step()
    tensors = [*params, *(value for state in optimizer.state.values() for value in state.values())]
    return [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]


def check_reduction() -> str:
    """Check that the mean of a gradient over ranks is summed in FP32 and the same on all ranks."""
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        raise Missing(f"only one process; to check the reduction between several: {LAUNCH}")
    ranks, device = group.size(), _training_arguments().device
    gradient = torch.randn(10_007, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16().to(device)
    by_rank = [torch.empty_like(gradient) for _ in range(ranks)]
    dist.all_gather(by_rank, gradient)
    exact = torch.stack(by_rank).double()

    BucketAverager(group)(gradient, is_first=True, is_last=True).wait()
    dist.all_gather(by_rank, gradient)  # before any comparison, so that no rank waits for one that has failed
    # Half a unit in the last place of the result, plus the rounding error of one FP32 addition per rank.
    bound = exact.mean(0).abs() * 2**-8 + exact.abs().sum(0) * ranks * 2**-24
    if not all(torch.equal(other, gradient) for other in by_rank):
        raise Broken(f"means over {ranks} ranks differ from rank to rank")
    if ((gradient.double() - exact.mean(0)).abs() > bound).any():
        raise Broken(f"means over {ranks} ranks do not match an FP32 sum")
    return f"{ranks} ranks over {dist.get_backend()}: FP32 means of BF16 gradients, the same on all"


def check_training() -> str:
    """Check a run of the stock Trainer with one of our names: correct dtypes, every weight changes, the loss falls."""
    if not dist.is_initialized() and (gpus := _training_arguments().n_gpu) > 1:
        raise Missing(f"one process and {gpus} GPUs; set CUDA_VISIBLE_DEVICES=0 to check one GPU, or use {LAUNCH}")
    trainer, before = _train()
    if dist.is_initialized() and trainer.args.world_size != dist.get_world_size():
        raise Broken(
            f"{dist.get_world_size()} processes were started, but Trainer trains with {trainer.args.world_size}"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    try:
        check_replicas(model, trainer.optimizer)
    except RuntimeError as error:  # on every rank
        raise Broken(str(error)) from error
    after = {name: param.detach().cpu() for name, param in model.named_parameters()}
    wrong = [name for name, param in after.items() if (param.dtype == torch.float32) != ("norm" in name)]
    unmoved = [name for name, param in after.items() if torch.equal(param.float(), before[name].float())]
    if wrong or unmoved:
        raise Broken(
            f"weights with an unexpected dtype: {wrong or 'none'}; weights that did not change: {unmoved or 'none'}"
        )
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    first, last = logs[0]["loss"], logs[-1]["loss"]
    if not last < first:
        raise Broken(f"the loss of a tiny Llama went from {first:.2f} to {last:.2f} in {_STEPS} steps")
    lost = round(logs[-1][LOST_UPDATES], 3) + 0.0  # avoids -0.0
    where = f"on {trainer.args.device}, world of {trainer.args.world_size}"
    return f"{_STEPS} steps {where}: loss {first:.2f} to {last:.2f}, {lost:.1%} of the last update lost"


def _train() -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Train the tiny Llama.

    Returns:
        The trainer after training, and a copy of the weights before it, by name, on the CPU.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, **sizes))  # type: ignore[arg-type]
    tokens = (torch.arange(_VOCABULARY).unsqueeze(1) + torch.arange(_LENGTH)) % _VOCABULARY
    trainer = Trainer(
        model,
        _training_arguments(optim="adamw_bf16_split", learning_rate=1e-2, max_steps=_STEPS, logging_steps=1),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],  # type: ignore[arg-type]
        callbacks=[hf_lowprec.LowPrecisionCallback(report=False)],
    )
    trainer.remove_callback(PrinterCallback)
    before = {name: param.detach().to("cpu", copy=True) for name, param in model.named_parameters()}
    trainer.train()
    return trainer, before


def _training_arguments(**options: object) -> TrainingArguments:
    """Return `TrainingArguments` that write and print nothing, for the device that Trainer chooses."""
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "log_level": "error"}
    quiet |= {"ddp_find_unused_parameters": False}
    use_cpu = not torch.accelerator.is_available()  # otherwise accelerate starts no process group on a CPU
    return TrainingArguments(gettempdir(), use_cpu=use_cpu, **quiet, **options)  # type: ignore[arg-type]


CHECKS: dict[str, Callable[[], str]] = {
    "versions": show_versions,
    "packages": check_packages,
    "names": check_names,
    "steps": check_steps,
    "reduction": check_reduction,
    "training": check_training,
}
"""The checks by their printed names, in the order in which they run."""
