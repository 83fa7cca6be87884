"""Find settings whose training fits in a GPU's memory, for `hf-lowprec estimate --fit`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hf_lowprec.integrations.checkpoint_files.input_files import InputError
from hf_lowprec.tools.estimate.activations import Activations, estimate_activations
from hf_lowprec.tools.estimate.memory import low_precision_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RESERVE = 2 << 30
"""Bytes that stay free: CUDA's own memory, scratch memory of kernels, and what a card has less than its name says."""

_INT8, _FACTORED, _OFFLOAD = "state_dtype=int8", "factored=True", "offload_states=True"
_RELEASE = "gradient_release=True,clip=delayed"
_OFFLOAD_ALL = f"{_OFFLOAD},offload_gradients=True"


class Option(NamedTuple):
    """An optimizer with its options, as in TrainingArguments.

    Attributes:
        title: the words for it; *release* is gradient release.
        optim: as in TrainingArguments.
        optim_args: as in TrainingArguments.
        gradient_checkpointing: as in TrainingArguments.
    """

    title: str
    optim: str
    optim_args: str = ""
    gradient_checkpointing: bool = True


OPTIONS = (
    Option("split, without gradient checkpointing", "adamw_bf16_split", gradient_checkpointing=False),
    Option("split", "adamw_bf16_split"),
    Option("split, release", "adamw_bf16_split", _RELEASE),
    Option("split, 8-bit states", "adamw_bf16_split", _INT8),
    Option("split, 8-bit states, release", "adamw_bf16_split", f"{_INT8},{_RELEASE}"),
    Option("stochastic", "adamw_bf16_sr"),
    Option("stochastic, release", "adamw_bf16_sr", _RELEASE),
    Option("stochastic, 8-bit states", "adamw_bf16_sr", _INT8),
    Option("stochastic, 8-bit states, release", "adamw_bf16_sr", f"{_INT8},{_RELEASE}"),
    Option("stochastic, factored, 8-bit", "adamw_bf16_sr", f"{_FACTORED},{_INT8}"),
    Option("stochastic, factored, 8-bit, release", "adamw_bf16_sr", f"{_FACTORED},{_INT8},{_RELEASE}"),
    Option("Adafactor, split", "adafactor_bf16_split"),
    Option("Adafactor, split, release", "adafactor_bf16_split", _RELEASE),
    Option("Adafactor, stochastic, release", "adafactor_bf16_sr", _RELEASE),
    Option("split, states on the host", "adamw_bf16_split", _OFFLOAD),
    Option("split, states, gradients on host", "adamw_bf16_split", _OFFLOAD_ALL),
    Option("split, states on the host, release", "adamw_bf16_split", f"{_OFFLOAD},{_RELEASE}"),
)
"""In the order in which they are proposed. Checkpointing and smaller micro-batches cost time; release costs exact
clipping; 8-bit and factored states, the other modes and Adafactor change what is computed; states on the host cost most
time."""


class Setting(NamedTuple):
    """An option with a size of micro-batches, and its memory.

    Attributes:
        option: the optimizer with its options.
        batch_size: sequences per GPU and micro-batch.
        gradient_accumulation_steps: micro-batches per step.
        sync_each_batch: whether FSDP2 reduces gradients after every micro-batch, so that it keeps only shards of them.
        peak: the most bytes that a GPU holds at once.
        missing: bytes that a GPU lacks; at most 0 if the setting fits.
        checkpoint: bytes of a checkpoint on disk: weights and optimizer state.
        host: bytes of host memory that training takes on all GPUs' machines: states, gradients, and memory through
            which they travel.
        chunked_loss_saves: bytes by which `peak` would be smaller with a chunked loss.
    """

    option: Option
    batch_size: int
    gradient_accumulation_steps: int
    sync_each_batch: bool
    peak: float
    missing: float
    checkpoint: int
    host: int
    chunked_loss_saves: float = 0


def find_fit(
    build: Callable[[], PreTrainedModel],
    gpu_bytes: float,
    gpus: int,
    batch_size: int,
    sequence_length: int,
    gradient_accumulation_steps: int,
    gradient_checkpointing: bool,
    chunked_loss: bool = False,
) -> list[Setting]:
    """Try each of `OPTIONS` with the largest micro-batch that fits, or else the one that needs the least memory.

    A step sees the same sequences in all settings, so gradient release, which cannot accumulate, has one micro-batch.

    Args:
        build: builds the model in FP32 on the meta device.
        gpu_bytes: memory of each GPU.
        gpus: number of GPUs over which FSDP2 shards the training state.
        batch_size: sequences per GPU in the largest micro-batch.
        sequence_length: tokens per sequence.
        gradient_accumulation_steps: micro-batches of that size per step.
        gradient_checkpointing: whether to try no options without it.
        chunked_loss: as in `estimate_activations`.

    Raises:
        InputError: the activations of the model cannot be estimated.
    """
    # The same for all optimizers, since they train the same BF16 model. The last has a chunked loss, if there is one.
    counted: dict[tuple[bool, int], list[Activations]] = {}

    def try_setting(option: Option, size: int, sync: bool) -> Setting:
        steps = gradient_accumulation_steps * batch_size // size
        model = build()
        row = low_precision_row(model, option.optim, option.optim_args or None, gpus, 1 if sync else steps)
        key = option.gradient_checkpointing, size
        if key not in counted:
            shape = size, sequence_length, option.gradient_checkpointing
            counted[key] = [estimate_activations(model, *shape, chunked_loss)]
            if not chunked_loss:
                with suppress(InputError):
                    counted[key].append(estimate_activations(model, *shape, chunked_loss=True))
        rows = (row._replace(activations=each) for each in counted[key])
        peaks = [peak for each in rows if (peak := each.peak(gpus, steps)) is not None]
        peak, chunked_loss_saves = peaks[0], max(0, peaks[0] - peaks[-1])
        checkpoint = row.memory.weights.total() + row.memory.state.total() + row.host_states
        missing, host = peak + RESERVE - gpu_bytes, row.on_host(gpus)
        return Setting(option, size, steps, sync, peak, missing, checkpoint, host, chunked_loss_saves)

    divisors = [each for each in range(batch_size, 0, -1) if batch_size % each == 0]
    settings = []
    for option in OPTIONS:
        releases = _RELEASE in option.optim_args
        if (releases and gradient_accumulation_steps > 1) or gradient_checkpointing > option.gradient_checkpointing:
            continue
        sizes = [batch_size] if releases or not option.gradient_checkpointing else divisors
        tries = [(size, False) for size in sizes]
        if gpus > 1:
            tries += [(size, True) for size in sizes if size < batch_size * gradient_accumulation_steps]
        tried = []
        for size, sync in tries:
            tried.append(try_setting(option, size, sync))
            if tried[-1].missing <= 0:
                break
        settings.append(min(tried, key=lambda setting: setting.peak))
    return settings
