"""Sums of 16-bit gradients in FP32, across ranks and across micro-batches."""

from hf_lowprec.reduction.compare_ranks import check_replicas
from hf_lowprec.reduction.ddp import BucketAverager, reduce_in_fp32
from hf_lowprec.reduction.fsdp2 import reduce_scatter_in_fp32, shard_fp32_parameters
from hf_lowprec.reduction.grad_accumulation import GradientAccumulator
from hf_lowprec.reduction.rank_mean import mean_in_rank_order

__all__ = [
    "BucketAverager",
    "GradientAccumulator",
    "check_replicas",
    "mean_in_rank_order",
    "reduce_in_fp32",
    "reduce_scatter_in_fp32",
    "shard_fp32_parameters",
]
