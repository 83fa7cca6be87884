"""Use FSDP2 and HSDP through accelerate on a CPU; accelerate itself does so on GPUs only."""

import functools
import os
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig


def accelerator_arguments(kind: str, **options: Any) -> dict[str, Any]:
    """Arguments of `Accelerator` for "ddp", "fsdp2", "hsdp" with two replicas, or "cp" with two ranks per sequence.

    `options` are those of FSDP.
    """
    arguments: dict[str, Any] = {}
    if kind != "ddp":
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    if kind in ("hsdp", "cp"):
        shards = int(os.environ["WORLD_SIZE"]) // 2
        two = {"dp_replicate_size": 2} if kind == "hsdp" else {"cp_size": 2}
        arguments["parallelism_config"] = ParallelismConfig(dp_shard_size=shards, **two)
    return arguments


def allow_fsdp_on_cpu() -> None:
    """Let every `Accelerator` that is given an FSDP plugin, or is launched for FSDP, use it."""
    original = Accelerator.__init__

    @functools.wraps(original)
    def build(self, *args, fsdp_plugin=None, parallelism_config=None, **kwargs):
        if fsdp_plugin is None and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            fsdp_plugin = FullyShardedDataParallelPlugin()
        if parallelism_config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
            parallelism_config = ParallelismConfig()
            os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
        # Several of them in one process, one after the other.
        AcceleratorState._reset_state()
        if PartialState(cpu=True).distributed_type == DistributedType.FSDP:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            # Every new AcceleratorState takes it from there, as accelerate leaves it there itself.
            self.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.state.fsdp_plugin = fsdp_plugin
        if parallelism_config is not None:
            self.state.parallelism_config = parallelism_config
            self.state.device_mesh = parallelism_config.get_device_mesh(self.device.type)

    gather = Accelerator.get_state_dict

    @functools.wraps(gather)
    def get_state_dict(self, *args, **kwargs):
        # Moving to the CPU waits for a gathered tensor; one that is there already is still on its way.
        state = gather(self, *args, **kwargs)
        return {name: value.wait() if hasattr(value, "wait") else value for name, value in state.items()}

    Accelerator.__init__ = build
    Accelerator.get_state_dict = get_state_dict
