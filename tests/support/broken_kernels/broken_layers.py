"""Find layers that torch computes wrongly on this machine, as oneDNN does some BF16 convolutions on CPUs with AMX.

A model that holds one cannot train as in FP32, whatever the cast does. Where a comparison fails, each layer is
probed in the very shapes in which the model calls it. If a probe fails, the comparison is made once more, with the same
bounds, and that layer in FP32: the way out that users are given. If none fails, the fault is ours.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_lowprec.monitor.layer_probes import Probe, describe_layer, probe_layer

Batch = dict[str, Any]
Built = tuple[nn.Module, Batch]


def broken_layers(model: nn.Module, batch: Batch) -> dict[str, Probe]:
    """The layers of an FP32 model whose probes fail in BF16, by name; each probed in every shape it is called with."""
    called: dict[str, dict[tuple[int, ...], None]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                called.setdefault(name, {})[tuple(args[0].shape)] = None

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    known: dict[tuple[str, tuple[int, ...]], Probe | None] = {}
    broken = {}
    for name, shapes in called.items():
        layer = model.get_submodule(name)
        for shape in shapes:
            key = (describe_layer(layer), shape)
            if key not in known:
                known[key] = _probe(layer, shape)
            if (probe := known[key]) is not None and probe.broken:
                broken[name] = probe
    return broken


def _probe(layer: nn.Module, shape: tuple[int, ...]) -> Probe | None:
    try:
        return probe_layer(layer, input_shape=shape)
    except RuntimeError:  # torch does not run it so: no reason to leave a failure to it
        return None


def report(title: str, broken: dict[str, Probe]) -> None:
    """Name them in pytest's summary."""
    for name, probe in broken.items():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"{title}: {name} is wrong on this machine and was kept in FP32. {probe}", stacklevel=2)


def check_around_broken_layers(
    title: str, build: Callable[[], Built], check: Callable[[nn.Module, Batch, tuple[str, ...]], None]
) -> None:
    """Run `check(model, batch, keep_fp32)`; if it fails and a layer is broken, once more with that layer in FP32."""
    try:
        check(*build(), ())
    except AssertionError:
        if not (broken := broken_layers(*build())):
            raise
        report(title, broken)
        check(*build(), tuple(broken))
