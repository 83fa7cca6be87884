"""The only module that uses private names of DeepSpeed: the layout of its partitions, its sums and its norm.

Each has a test in `tests/deepspeed/test_private_apis.py` that fails when a new version of the library removes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from hf_lowprec.wrapped_method import temporarily_wrapped, wrap_method

_AVG_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"


class Piece(NamedTuple):
    """A range of a parameter, which may be empty, that lies in a rank's flat partition.

    Attributes:
        param: the parameter of the model.
        shape: its shape. ZeRO 3 leaves the parameter itself empty.
        bounds: where the range of each rank begins in the flattened parameter, and where the last one ends.
        offset: index of this rank's first element in the partition.
    """

    param: nn.Parameter
    shape: torch.Size
    bounds: tuple[int, ...]
    offset: int


class Partition(NamedTuple):
    """A flat tensor that DeepSpeed has the optimizer step.

    Attributes:
        flat: this rank's part of some parameters, one after the other.
        group: the position of their param group among those that DeepSpeed was given.
        ranks: the ranks that hold the other parts.
        pieces: all parameters of the group in order, even those that this rank holds nothing of. The rest is padding.
    """

    flat: Tensor
    group: int
    ranks: Any
    pieces: list[Piece]


def shares_experts(zero: Any) -> bool:
    """Return whether the model has DeepSpeed's own expert layers, each of which is on only some ranks."""
    return bool(getattr(zero, "has_moe_layers", False))


def is_stage_3(zero: Any) -> bool:
    """Return whether a ZeRO optimizer also partitions the parameters."""
    return isinstance(zero, DeepSpeedZeroOptimizer_Stage3)


def partitions(zero: Any) -> Iterator[Partition]:
    """Yield the flat tensors that a ZeRO optimizer steps on this rank."""
    if is_stage_3(zero):
        for k, params in enumerate(zero.fp16_groups):
            ranks, pieces, offset = zero._get_sub_group_process_group(k), [], 0
            for param in params:
                size = param.partition_numel()
                bounds = tuple(min(rank * size, param.ds_numel) for rank in range(ranks.size() + 1))
                pieces.append(Piece(param, param.ds_shape, bounds, offset))
                offset += size
            yield Partition(zero.fp32_partitioned_groups_flat[k], zero.sub_group_to_group_id[k], ranks, pieces)
        return
    for k, flat in enumerate(zero.single_partition_of_fp32_groups):
        ranks, size, pieces = zero.real_dp_process_group[k], zero.partition_size[k], []
        for param, offset in zip(zero.round_robin_bit16_groups[k], zero.round_robin_bit16_offsets[k], strict=True):
            bounds = tuple(min(max(rank * size - offset, 0), param.numel()) for rank in range(ranks.size() + 1))
            pieces.append(Piece(param, param.shape, bounds, max(offset - ranks.rank() * size, 0)))
        yield Partition(flat, k, ranks, pieces)


@contextmanager
def keeping_dtypes() -> Iterator[None]:
    """Let DeepSpeed leave parameters in the dtypes that they have while it is initialized.

    It would cast all of them to BF16, and ZeRO 3 moves all partitions into one tensor.
    """

    def defragment(original: Callable, tensors: list[Tensor]) -> Tensor:
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_dtype[tensor.dtype].append(tensor)
        first, *_ = (original(alike) for alike in by_dtype.values())  # every tensor becomes a part of what it returns
        return first

    def set_flat_groups(original: Callable, zero: Any) -> None:
        for params in zero.fp16_groups:
            first, size = params[0].ds_tensor, sum(param.partition_numel() for param in params)
            zero.fp16_partitioned_groups_flat.append(first.detach().as_strided((size,), (1,)))

    with (
        temporarily_wrapped(DeepSpeedEngine, "_cast_module_mixed_precision", lambda *_, **__: None),
        temporarily_wrapped(DeepSpeedEngine, "_DeepSpeedEngine__check_params", lambda *_, **__: None),
        temporarily_wrapped(stage3, "defragment", defragment),
        temporarily_wrapped(DeepSpeedZeroOptimizer_Stage3, "_set_fp16_partitioned_groups_flat", set_flat_groups),
    ):
        yield


def step_weights_in_place(zero: Any) -> None:
    """Let a ZeRO optimizer step the model's weights themselves, in their dtype, and free its BF16 copies.

    ZeRO 3 does not copy BF16 weights.
    """
    if is_stage_3(zero):
        for flat, weights in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
            flat.data = weights.data
        return
    for k, flat in enumerate(zero.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(zero.real_dp_process_group[k])
        flat.data = zero.parallel_partitioned_bit16_groups[k][rank].data


def take_clip_grad(zero: Any) -> float:
    """Return the norm to which a ZeRO optimizer clips, 0 for none, and stop it from clipping."""
    limit, zero.clip_grad = float(zero.clip_grad), 0.0
    return limit


def ignore_nonfinite(zero: Any) -> None:
    """Let a ZeRO optimizer step with any gradients, because the optimizer inside skips those that are not finite.

    ZeRO 3 does not step, but it computes the norm first, so the optimizer counts the skipped steps.
    """
    zero.check_grad_overflow = False


def replace_norm(zero: Any, norm_of: Callable[[Iterable[Tensor]], Tensor]) -> None:
    """Let `norm_of` compute the norm from this rank's part of the gradients that the step will use."""

    def gradients() -> Iterator[Tensor]:
        stepped = zero.fp32_partitioned_groups_flat if is_stage_3(zero) else zero.single_partition_of_fp32_groups
        for k, grads in zero.averaged_gradients.items():
            yield from (grad.to(stepped[k].dtype) for grad in grads or ())

    if is_stage_3(zero):
        zero._get_norm_groups = lambda: [norm_of(gradients())]
    else:
        zero.scaled_global_norm = lambda norm_type=2: norm_of(gradients())


def device_of(zero: Any) -> torch.device:
    """Return the device of the partitions."""
    return next(partitions(zero)).flat.device


def data_parallel_group(zero: Any) -> Any:
    """Return the ranks among which a ZeRO optimizer partitions."""
    return zero.dp_process_group


MeanOfSlices = Callable[[list[list[Tensor]], Any, int], Tensor]
"""See `mean_of_slices` in `reduction/rank_mean.py`."""


def replace_sums(zero: Any, mean_of: MeanOfSlices) -> None:
    """Let `mean_of` average gradients over ranks."""
    if is_stage_3(zero):
        zero.reduce_scatter = True  # this path calls the method below
        setattr(zero, _AVG_SCATTER, lambda params, _: _average_for_stage_3(zero, params, mean_of))
    else:
        zero.reduce_scatter = True
        zero.use_multi_rank_bucket_allreduce = True
        zero.gradient_average = False  # in 16 bits
        zero.allreduce_and_scatter = lambda bucket, _, process_group=None, **options: _average_bucket(
            zero, bucket, process_group, mean_of
        )


def _divisor(zero: Any, group: Any) -> int:
    """Return the number of ranks with different samples. Under sequence parallelism, several ranks share a sample."""
    return group.size() // int(zero.sequence_parallel_size)


def _average_bucket(zero: Any, bucket: list[Any], group: Any, mean_of: MeanOfSlices) -> None:
    """Average a bucket, instead of `allreduce_and_scatter` of ZeRO 1 and 2.

    Args:
        zero: the ZeRO optimizer.
        bucket: `((rank,), slice, output)`: the rank that gets the mean of a slice of gradients, the slice, which the
            mean replaces, and a tensor to which the mean is also added, or None.
        group: the ranks.
        mean_of: computes the means.
    """
    group = group or zero.dp_process_group
    slices: list[list[Tensor]] = [[] for _ in range(group.size())]
    own: list[tuple[Tensor, Tensor | None]] = []
    for ranks, part, output in bucket:
        (rank,) = ranks
        slices[rank].append(part.bfloat16())  # norms larger than a bucket are FP32
        if rank == group.rank():
            own.append((part, output))
    means = mean_of(slices, group, _divisor(zero, group)).split([part.numel() for part, _ in own])
    for (part, output), mean in zip(own, means, strict=True):
        part.copy_(mean)
        if output is not None:
            output.add_(mean.to(output.dtype))


def _average_for_stage_3(zero: Any, params: Sequence[Any], mean_of: MeanOfSlices) -> list[Tensor]:
    """Return the means of this rank's padded partitions of gradients, instead of ZeRO 3's `__avg_scatter_grads`."""
    group = zero._get_param_partition_group(params[0])
    slices: list[list[Tensor]] = [[] for _ in range(group.size())]
    for param in params:
        size, flat = param.partition_numel(), param.grad.reshape(-1).bfloat16()
        padded = nn.functional.pad(flat, (0, size * group.size() - flat.numel()))
        for rank, part in enumerate(padded.split(size)):
            slices[rank].append(part)
    means = mean_of(slices, group, _divisor(zero, group)).split([param.partition_numel() for param in params])
    return [mean.to(zero.gradient_accumulation_dtype) for mean in means]


SAVED_WEIGHTS = {False: "single_partition_of_fp32_groups", True: "fp32_flat_groups"}
"""The key of the weights in a ZeRO optimizer's state dict, by `is_stage_3`; `zero_to_fp32.py` reads them."""
SAVED_OPTIMIZER = {False: "base_optimizer_state", True: "optimizer_state_dict"}
"""The key of the state dict of the optimizer that it steps."""


_OF_ARRAYS = (np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"))
_MAKE_ARRAYS = (np.zeros(0).__reduce__()[0], np.float64().__reduce__()[0])
SAVED_CLASSES = (fragment_address, LossScaler, ZeroStageEnum, *_OF_ARRAYS, *_MAKE_ARRAYS)
"""The classes other than tensors in DeepSpeed's pickles: those of ZeRO's states, and NumPy arrays."""


def saved_by(saved: dict[str, Any]) -> tuple[int, int]:
    """Return the number of ranks that saved the optimizer states, and their stage of ZeRO."""
    states = saved["optimizer_state_dict"]
    ranks = states["partition_count"]  # ZeRO 1 and 2 have one for each param group
    return max(ranks) if isinstance(ranks, list) else ranks, int(states["zero_stage"])


def wrap_state_dict(
    zero: Any,
    save: Callable[[list[Tensor]], list[Tensor]],
    check: Callable[[Any], None],
    load: Callable[[], None],
) -> None:
    """Change the weights that a ZeRO optimizer saves, and call functions before and after it loads.

    Args:
        zero: the ZeRO optimizer.
        save: called with the weights of each partition, without the padding at its end; returns the weights to save.
        check: called with the optimizer's state dict before it is loaded; may raise.
        load: called after a state dict was loaded.
    """
    key = SAVED_WEIGHTS[is_stage_3(zero)]

    def state_dict(original: Callable, zero: Any) -> dict[str, Any]:
        saved = original(zero)
        return {**saved, key: save(saved[key])}

    def load_state_dict(original: Callable, zero: Any, state_dict_list: list[dict[str, Any]], **kwargs: Any) -> None:
        rank = torch.distributed.get_rank(zero.dp_process_group)
        check(state_dict_list[rank][SAVED_OPTIMIZER[is_stage_3(zero)]])
        original(zero, state_dict_list=state_dict_list, **kwargs)
        load()

    wrap_method(zero, "state_dict", state_dict)
    wrap_method(zero, "load_state_dict", load_state_dict)
