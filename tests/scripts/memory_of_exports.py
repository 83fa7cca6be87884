"""Print how many bytes of memory exports take, and the sizes that bound them, as JSON.

memory_of_exports.py FOLDER
"""

import ctypes
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import hf_lowprec

SHARD = 4_000_000
SIZES = {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}


def anonymous_memory() -> int:
    """Bytes of this process's memory that belong to no file: those of mapped files can be dropped at any time."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def peak_of(act: Callable[[], object]) -> int:
    """By how many bytes memory grew at most while `act` ran, looked at every millisecond."""
    before = peak = anonymous_memory()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    done.set()
    watcher.join()
    return peak - before


def saved(folder: Path, model: torch.nn.Module):
    """A model and its optimizer after one step, saved by accelerate."""
    accelerator = Accelerator(cpu=True)
    model.to(torch.bfloat16)
    optimizer = hf_lowprec.AdamW(model.parameters(), rounding="kahan", state_dtype=torch.bfloat16)
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.arange(16)[None], labels=torch.arange(16)[None]).loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return model, optimizer


def return_freed_memory() -> None:
    """Make the C library return freed tensors to the system, so that they do not count."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    mallopt(-1, 1 << 16)  # M_TRIM_THRESHOLD


def measured(folder: Path, model: torch.nn.Module) -> dict[str, int]:
    """The memory that `save_pretrained` and `export_checkpoint` take, and the sizes that bound it, in bytes."""
    model, optimizer = saved(folder / "state", model)
    options = {"max_shard_size": SHARD}
    sizes = [4 * param.numel() for param in model.parameters()]
    return {
        "model": sum(sizes),
        "tensor": max(sizes),
        "shard": SHARD,
        "function": peak_of(lambda: hf_lowprec.save_pretrained(model, optimizer, folder / "live", **options)),
        "command": peak_of(lambda: hf_lowprec.export_checkpoint(folder / "state", folder / "out", **options)),
    }


def main(folder: str) -> None:
    return_freed_memory()
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    large = {"hidden_size": 512, "intermediate_size": 1024}
    cases = {
        "warm-up": LlamaForCausalLM(LlamaConfig(**SIZES, **tiny)),  # what later exports find imported
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, **large, num_hidden_layers=5)),
        "mixtral": MixtralForCausalLM(MixtralConfig(**SIZES, **large, num_hidden_layers=2, num_local_experts=4)),
    }
    for name, model in cases.items():
        print(json.dumps({name: measured(Path(folder, name), model)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
