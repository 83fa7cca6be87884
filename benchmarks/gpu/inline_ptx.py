"""The kernels with inline PTX and without it, which says whether the PTX is worth its code."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from gradient_kinds import RANDOM, give_gradients

from gpu import parity
from gpu.budget import Budget, OutOfTime, line
from gpu.candidates import BF16, COMMON, MODES, our_backend
from gpu.device import Device
from gpu.measuring import Say
from gpu.shapes import Llama, parameters
from gpu.tuning import replaced
from hf_lowprec import AdamW, StableAdamW
from hf_lowprec.optim.backends.triton import launch

WITH, WITHOUT = "inline PTX", "no PTX"
FORMS: dict[str, dict[str, Any]] = {
    WITH: {},
    WITHOUT: {"INLINED_PTX": ()},
    # The compiler may take more registers than it is worth; then the limit is what helps, and not the PTX.
    "no PTX, same limit of registers": {
        "INLINED_PTX": (),
        "_register_options": lambda spec, ptx, device: {"maxnreg": launch.max_registers(spec)},
    },
}
OPTIMIZERS = [(AdamW, mode) for mode in MODES if "state_dtype" not in MODES[mode]] + [(StableAdamW, "kahan")]
"""StableAdamW has one more kernel with PTX, for its means over tensors."""
KINDS = {"step": RANDOM, "step_ragged": "2 bytes into a bucket"}
"""Gradients with which this kernel steps almost all elements."""


def measure(
    device: Device, model: Llama, repeats: int, budget: Budget, say: Say, keep: Callable[[list[dict[str, Any]]], None]
) -> dict[str, str]:
    """Hand rows to `keep` as they come: one per optimizer and kernel. Returns failures."""
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    if not device.rehearsal and not launch._ptx(device.device):
        say("inline PTX: not on this GPU")
        return failures
    for cls, mode in OPTIMIZERS:
        name = f"{cls.__name__}, {mode}"
        try:
            with budget.limit(60):
                if cls is AdamW:  # a kernel that is wrong without PTX cannot replace the other
                    with replaced(**FORMS[WITHOUT]):
                        wrong = parity.mismatch(device, mode, (BF16,))
                    if wrong:
                        failures[name] = f"wrong bits without inline PTX: {wrong}"
                        continue
                for kernel in KINDS:
                    rows.append(
                        {"optimizer": name, "kernel": kernel, **_times(device, model, cls, mode, kernel, repeats)}
                    )
                    say(f"inline PTX: {rows[-1]}")
                    keep(rows)
        except (Exception, OutOfTime) as error:
            say(f"inline PTX, {name}: failed: {line(error)}")
            if isinstance(error, OutOfTime) and error.expected:
                return failures
            failures[name] = line(error)
        device.release()
    return failures


def _times(device: Device, model: Llama, cls: type, mode: str, kernel: str, repeats: int) -> dict[str, Any]:
    """The median milliseconds of each form, in turn, and how many times as long those without PTX take."""
    params = parameters(model.shapes, BF16, device.device)
    give_gradients(params, KINDS[kernel])
    forms = {form: cls(params, **COMMON, **MODES[mode], backend=our_backend(device)) for form in FORMS}
    samples: dict[str, list[float]] = {form: [] for form in FORMS}
    for repeat in range(3 + repeats):
        for form, optimizer in forms.items():
            with replaced(**FORMS[form]):
                time, _ = device.device_ms(optimizer.step, 5.0)
            if repeat >= 3:
                samples[form].append(time)
    medians = {form: statistics.median(times) for form, times in samples.items()}
    return {"ms": medians, "ratio": {form: medians[form] / medians[WITH] for form in FORMS if form != WITH}}
