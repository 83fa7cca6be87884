"""The GPU as the benchmark sees it: every CUDA call is in `Gpu`, and `Rehearsal` answers in its place without one."""

from __future__ import annotations

import gc
import json
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Action = Callable[[], object]


class Device(ABC):
    """The device to measure on.

    Attributes:
        name: of the machine.
        device: for tensors.
        rehearsal: whether times mean nothing.
    """

    name: str
    device: torch.device
    rehearsal = False
    _activities: tuple[ProfilerActivity, ...]

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""

    @abstractmethod
    def device_ms(self, action: Action, ahead_ms: float) -> tuple[float, bool]:
        """Milliseconds that the device works on `action`, starting with a cold cache.

        The device is kept busy for `ahead_ms` first, so that the host can queue the whole of `action` and the time
        between its launches does not count.

        Returns:
            `(milliseconds, whether the host was done before the device began)`.
        """

    @abstractmethod
    def mark(self) -> Any:
        """A point in the device's queue."""

    @abstractmethod
    def between(self, first: Any, second: Any) -> float:
        """Milliseconds from one mark to another; both are behind the device."""

    @abstractmethod
    def allocated(self) -> int:
        """Bytes that tensors occupy."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Forget the peak so far."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes that tensors occupied since `reset_peak`."""

    @abstractmethod
    def release(self) -> None:
        """Give back what no tensor holds."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts about the machine for the report."""

    def host_and_wall_ms(self, action: Action) -> tuple[float, float]:
        """Milliseconds until `action` returns, and until the device is done with it, from an idle device."""
        self.synchronize()
        begin = time.perf_counter()
        action()
        returned = time.perf_counter()
        self.synchronize()
        return 1e3 * (returned - begin), 1e3 * (time.perf_counter() - begin)

    def launches(self, action: Action) -> dict[str, Any]:
        """Kernels and copies that `action` starts, and how long the device takes for the kernels.

        Raises:
            RuntimeError: the profiler saw none, which is no count.
        """
        with profile(activities=list(self._activities)) as profiler:
            action()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
        copies = [event for event in trace["traceEvents"] if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
        if not kernels and not self.rehearsal:
            raise RuntimeError("the profiler saw no kernel")
        names: dict[str, int] = {}
        for event in kernels:
            names[event["name"][:120]] = names.get(event["name"][:120], 0) + 1
        return {
            "kernels": len(kernels),
            "copies": len(copies),
            "kernel_ms": sum(event.get("dur", 0.0) for event in kernels) / 1e3,
            "names": names,
        }


class Gpu(Device):
    """The first CUDA device."""

    _activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self._properties = torch.cuda.get_device_properties(self.device)
        self.name = self._properties.name
        cache = self._properties.L2_cache_size
        self._flushed = torch.empty(max(256 << 20, 2 * cache), dtype=torch.uint8, device=self.device)
        self._cycles_per_ms = 1e6
        for _ in range(3):  # the clock of an idle device is slow
            begin = self.mark()
            torch.cuda._sleep(100_000_000)
            end = self.mark()
            self.synchronize()
            self._cycles_per_ms = 1e8 / self.between(begin, end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def device_ms(self, action: Action, ahead_ms: float) -> tuple[float, bool]:
        self.synchronize()
        torch.cuda._sleep(int(ahead_ms * self._cycles_per_ms))
        awake = self.mark()
        self._flushed.zero_()  # twice the L2: nothing that the action reads is left in it
        begin = self.mark()
        action()
        end = self.mark()
        ahead = not awake.query()
        self.synchronize()
        return self.between(begin, end), ahead

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()

    def facts(self) -> dict[str, Any]:
        asked = ["driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu"]
        command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader", "--id=0"]
        facts: dict[str, Any] = {
            "gpu": self.name,
            "memory_gib": round(self._properties.total_memory / 2**30, 1),
            "l2_mb": round(self._properties.L2_cache_size / 1e6, 1),
            "multiprocessors": self._properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            facts |= dict(zip(asked, (value.strip() for value in answer.splitlines()[0].split(",")), strict=True))
        except Exception:  # only shown with the numbers
            facts["nvidia_smi"] = "did not answer"
        return facts


class Rehearsal(Device):
    """A CPU in the GPU's place: everything runs, and only the sizes of what stays allocated mean anything."""

    name = "rehearsal"
    device = torch.device("cpu")
    rehearsal = True
    _activities = (ProfilerActivity.CPU,)

    def synchronize(self) -> None:
        pass

    def device_ms(self, action: Action, ahead_ms: float) -> tuple[float, bool]:
        return self.host_and_wall_ms(action)[1], True

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        return 1e3 * (second - first)

    def allocated(self) -> int:
        found: dict[int, int] = {}
        for candidate in gc.get_objects():
            if type(candidate) in (torch.Tensor, torch.nn.Parameter) and candidate.device.type == "cpu":
                for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
                    if tensor is not None:
                        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(found.values())

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int:
        return self.allocated()

    def release(self) -> None:
        gc.collect()

    def facts(self) -> dict[str, Any]:
        return {"gpu": "none"}
