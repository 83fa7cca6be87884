"""Class weights in the model stay in FP32: torch's losses of FP32 predictions take no 16-bit weights."""

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.hooks.forward_code import is_code_of_transformers
from hf_lowprec.casting.hooks.input_hooks import losses_mix_dtypes
from hf_lowprec.casting.hooks.loss_predictions import loss_weights
from hf_lowprec.casting.module_tree import ModuleTree
from hf_lowprec.casting.quantized import frozen_tensors


def keep_loss_weights(tree: ModuleTree, parts: Fp32Parts, dtype: torch.dtype, heads: Iterable[str]) -> None:
    """Add to `parts` the tensors that the model's own `forward` gives to torch's losses as weights.

    Only where its predictions are FP32, or can be upcast (`hook_placement.weighted_prediction_hooks`).

    Args:
        tree: the model.
        parts: what else stays in FP32.
        dtype: the 16-bit dtype of the cast.
        heads: the modules that return FP32.
    """
    if is_code_of_transformers(tree.root):
        return
    fixed = {*parts.tensors, *frozen_tensors(tree.tensors)}
    cast = {id(target.tensor) for target in tree.tensors if target.name not in fixed}

    def dtype_of(tensor: Tensor) -> torch.dtype:
        return dtype if id(tensor) in cast and tensor.is_floating_point() else tensor.dtype

    names = {owner.name: target.name for target in tree.tensors for owner in target.owners}
    for weight in loss_weights(tree.root, losses_mix_dtypes(), dtype_of, frozenset(heads)):
        parts.tensors[names[weight]] = Reason("loss", "weights of classes in a loss")
