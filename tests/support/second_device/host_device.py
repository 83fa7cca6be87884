"""`hostdev`, a second device of torch on a machine without a GPU: see host_device.cpp.

Registered once, for the whole process; so tests that need it run as scripts.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import types
from contextlib import nullcontext
from pathlib import Path

import torch

from hf_lowprec.optim.backends.c.compiler import load_library

NAME = "hostdev"
_SOURCE = Path(__file__).with_name("host_device.cpp")


def missing() -> str:
    """Why the device cannot be built here; empty if it can."""
    return "" if shutil.which(_compiler()[0]) else f"needs a C++ compiler: there is no {_compiler()[0]!r}; set $CXX"


def register() -> torch.device:
    """Make the device known to torch. The first call on a machine compiles its library, which takes 10 seconds."""
    source = _SOURCE.read_bytes()
    parts = (source, torch.__version__.encode(), repr(_compiler()).encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    with open(Path(tempfile.gettempdir(), f"hf_lowprec-{NAME}-{os.getuid()}"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that of several tests at once only one compiles
        load_library(f"{NAME}-{key}.so", _compile)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        # Operations take their random numbers from the CPU's generator.
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "Stream": torch.Stream,
        "Event": torch.Event,
        "current_stream": lambda device=None: torch.accelerator.current_stream(NAME),
        "stream": lambda stream: stream,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module(NAME, module)
    return torch.device(NAME, 0)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _compile(folder: Path) -> Path:
    torch_folder, library = Path(torch.__file__).parent, folder / f"{NAME}.so"
    includes = [f"-I{torch_folder / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", *includes, f"-L{torch_folder / 'lib'}"]
    command = [*_compiler(), *flags, str(_SOURCE), "-o", str(library), "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True, timeout=250)
    return library
