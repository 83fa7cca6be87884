"""`hf-lowprec env`: print the facts about this machine that a bug report needs."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import typer

PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "safetensors", "peft", "trl", "datasets"),
    *("sentence-transformers", "liger-kernel", "bitsandbytes", "torchao"),
)
VARIABLES = ("CC", "HF_LOWPREC_CACHE", "OMP_NUM_THREADS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
"""Environment variables that change what runs, or how fast."""


def env() -> None:
    """Print versions, devices and backends for a bug report."""
    for name, value in machine_facts().items():
        typer.echo(f"- {name}: {value}")


def machine_facts() -> dict[str, str]:
    """Collect versions, devices and backends by name, in the order in which they are printed."""
    import torch

    import hf_lowprec

    facts = {
        "hf_lowprec": f"{hf_lowprec.__version__} in {Path(hf_lowprec.__file__).parent}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        **{name: _version(name) for name in PACKAGES},
        "CUDA of torch": str(torch.version.cuda or torch.version.hip or "none"),
        "C compiler": _compiler(),
        "cache of compiled steps": _cache(),
        "CPU": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, {_backend('cpu')}",
    }
    for k in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(k)
        device = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        facts[f"GPU {k}"] = f"{device}, sm_{properties.major}{properties.minor}, {_backend(f'cuda:{k}')}"
    return facts | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _version(package: str) -> str:
    """The installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    """The C compiler of the native backend and its version, or the reason why there is none."""
    from hf_lowprec.optim.backends.c.compiler import CompilerError, compiler_identity, require_compiler

    try:
        command = require_compiler()
        return f"{' '.join(command)}, {compiler_identity(command[0]).splitlines()[0]}"
    except CompilerError as error:
        return f"none ({error})"


def _cache() -> str:
    """The cache folder for compiled steps, or the reason why there is none."""
    from hf_lowprec.optim.backends.c.library_cache import cache_dir

    try:
        return str(cache_dir())
    except FileNotFoundError as error:
        return f"none ({error}; set HF_LOWPREC_CACHE)"


def _backend(device: str) -> str:
    """The backend that `backend="auto"` selects on a device."""
    import torch

    from hf_lowprec.optim.backends.selection import expected_backend

    return f"backend {expected_backend('auto', torch.device(device))}"
