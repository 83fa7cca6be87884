"""The memory of activations: one forward and backward of the model, run on the meta device, where nothing is computed.

Counted is what exists at the same time: tensors saved for the backward, logits and loss, temporaries, gradients of
activations. Attention counts as a fused kernel, as `sdpa` runs on GPUs, which keeps its inputs, its output and one FP32
number per query and head; dropout counts one byte per element.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_lowprec.integrations.checkpoint_files.input_files import InputError
from hf_lowprec.optim.gradients.buckets import GradientBucket

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_WITH_TOKEN_LABELS = (*_CAUSAL, "ForMaskedLM", "ForTokenClassification", "ForPreTraining")
"""Ends of the names of classes with one label per token."""
CHUNK = 4096, 32768
"""Positions, and entries of the vocabulary, whose logits TRL 1.16 computes at a time."""


class Activations(NamedTuple):
    """Bytes of one forward and backward, on one GPU.

    Attributes:
        peak: the most that exists at once apart from weights, accumulated gradients and states.
        with_gradients: the same where the gradients of the weights are new tensors, which appear one after the other
            during the backward, as in training without gradient accumulation.
        with_release: the same with gradient release, which frees them on the way.
    """

    peak: int
    with_gradients: int
    with_release: int


def estimate_activations(
    model: PreTrainedModel,
    batch_size: int,
    sequence_length: int,
    gradient_checkpointing: bool = False,
    chunked_loss: bool = False,
) -> Activations:
    """Count the activations of one forward and backward.

    Args:
        model: a model on the meta device, cast as in training. It is put into training mode.
        batch_size: sequences.
        sequence_length: tokens per sequence, without padding.
        gradient_checkpointing: as in TrainingArguments.
        chunked_loss: whether the loss is that of TRL's trainers, computed in chunks of the logits.

    Raises:
        InputError: the model does not take tokens alone, its forward depends on the values of tensors, or TRL has no
            chunked loss for it.
    """
    from transformers import PreTrainedConfig

    name = type(model).__name__
    inputs = _inputs(model, batch_size, sequence_length)
    model.train()
    for part in model.modules():  # T5's encoder and decoder have configurations of their own
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
            config.use_cache = False
    if gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        try:
            enable()
        except ValueError as error:
            raise InputError(f"{name} has no gradient checkpointing ({error})") from None
    memory = LiveMemory()
    try:
        with torch.enable_grad(), _gradients_apart(model, memory), _gpu_kernels(), memory, _NoPadding():
            loss = _chunked_loss(model, inputs["input_ids"]) if chunked_loss else model(**inputs).loss
            if loss is None:
                raise InputError(f"{name} computes no loss")
            loss.backward()
    except InputError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{name} does not run on tensors without values ({reason[0]})") from error
    finally:
        for param in model.parameters():
            param.grad = None
        if gradient_checkpointing:
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    return Activations(memory.peak, memory.peak_with_gradients, memory.peak_with_release)


def _inputs(model: PreTrainedModel, batch_size: int, sequence_length: int) -> dict[str, Tensor]:
    """A batch of tokens with labels, on the meta device."""
    name = type(model).__name__
    if model.main_input_name != "input_ids":
        raise InputError(f"{name} takes {model.main_input_name}, of which the size is not known")
    tokens = torch.empty(batch_size, sequence_length, dtype=torch.int64, device="meta")
    one = torch.empty(batch_size, dtype=torch.int64, device="meta")
    if name.endswith("ForQuestionAnswering"):
        return {"input_ids": tokens, "start_positions": one, "end_positions": one}
    if name.endswith("ForSequenceClassification"):
        return {"input_ids": tokens, "labels": one}
    if name.endswith(_WITH_TOKEN_LABELS) or getattr(model.config, "is_encoder_decoder", False):
        return {"input_ids": tokens, "labels": tokens}
    raise InputError(f"the labels of {name} are not known")


def _chunked_loss(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    if not type(model).__name__.endswith(_CAUSAL):
        raise InputError(f"{type(model).__name__} is not a causal language model, the kind with a chunked loss")
    hidden = model.base_model(tokens).last_hidden_state[:, :-1]
    labelled = torch.empty(hidden.shape[:2].numel(), dtype=torch.int64, device="meta")
    return _ChunkedLoss.apply(hidden[labelled, labelled], model.get_output_embeddings().weight)  # type: ignore[no-any-return,no-untyped-call]


class LiveMemory(TorchDispatchMode):
    """As a context manager, counts the bytes of the tensors that are created inside, while they exist, on any device.

    Memory counts once, however many tensors share it. What kernels allocate for themselves is not seen: the scratch
    memory of matrix products and of attention.

    Attributes:
        live: bytes that exist now, gradients excluded.
        gradients: bytes that exist now and were declared gradients by `count_as_gradient`.
        released: bytes of these gradients that gradient release would have freed by now; set by others.
        peak: the largest `live` so far.
        peak_with_gradients: the largest sum of `live` and `gradients` so far.
        peak_with_release: the largest such sum without what was released.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.gradients = self.released = 0
        self.peak = self.peak_with_gradients = self.peak_with_release = 0
        self._sizes: dict[int, int] = {}
        self._gradients: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch operation and count its results."""
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._add(storage, 0)  # if it is new here, it was made outside; results may be views of it
        results = function(*args, **kwargs)
        for storage in _storages(results):
            self._add(storage, storage.nbytes())
        return results

    def count_as_gradient(self, tensor: Tensor) -> None:
        """Move a tensor's bytes from `live` to `gradients`; nothing if they are already there or were never counted."""
        key = id(tensor.untyped_storage())
        if key in self._sizes and key not in self._gradients:
            self._gradients.add(key)
            self.live -= self._sizes[key]
            self.gradients += self._sizes[key]

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            with_gradients = self.live + self.gradients
            self.peak_with_gradients = max(self.peak_with_gradients, with_gradients)
            self.peak_with_release = max(self.peak_with_release, with_gradients - self.released)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._gradients:
            self._gradients.remove(key)
            self.gradients -= size
        else:
            self.live -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@contextmanager
def _gradients_apart(model: nn.Module, memory: LiveMemory) -> Iterator[None]:
    """Tell the gradients of weights from activations."""
    bucket = GradientBucket()

    def note_gradient(param: Tensor) -> None:
        if param.grad is not None:
            memory.count_as_gradient(param.grad)
            memory.released += sum(each.nbytes for each in bucket.take(bucket.add(param)))

    trained = (param for param in model.parameters() if param.requires_grad)
    handles = [param.register_post_accumulate_grad_hook(note_gradient) for param in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _NoPadding(TorchDispatchMode):
    """Answers the questions that models ask about the values of their inputs: there is no padding, and no packing.

    Models ask whether all of a mask is one, or any of it is not. Whatever else depends on values raises torch's error.
    """

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (torch.ops.aten.all.default, torch.ops.aten.any.default):
            return torch.tensor(function is torch.ops.aten.all.default, device="cpu")
        return function(*args, **(kwargs or {}))


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """Lets attention and dropout keep what their kernels on GPUs keep; the meta device has others.

    A TorchFunctionMode would not see layers that run again in the backward.
    """
    functional = nn.functional
    originals = functional.scaled_dot_product_attention, functional.dropout
    functional.scaled_dot_product_attention, functional.dropout = _attention, _dropout
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = originals


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    return _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-any-return,no-untyped-call]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


class _FusedAttention(torch.autograd.Function):
    """The tensors that a fused attention kernel reads, keeps and writes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *_ = ctx.saved_tensors
        needed = zip((query, key, value, mask), ctx.needs_input_grad, strict=True)  # a mask may be T5's position bias
        return tuple(torch.empty_like(tensor) if wanted else None for tensor, wanted in needed)


class _ChunkedLoss(torch.autograd.Function):
    """The tensors of TRL's loss. Its backward computes each chunk of logits again, and sums gradients in FP32.

    Those of its forward are fewer, so they do not count.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, head)
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, head = ctx.saved_tensors
        positions, entries = CHUNK
        _logits = hidden.new_empty(min(positions, len(hidden)), entries)
        sums = [torch.empty_like(tensor, dtype=torch.float32) for tensor in (hidden, head)]
        return sums[0].to(hidden.dtype), sums[1].to(head.dtype)
