"""The part of a model that a parameter belongs to, from its name and shape alone.

Files have names and shapes but no modules, so a checkpoint and a model in memory are divided in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

PARAMETER_KINDS = ("embeddings", "attention", "mlp", "norms", "head", "adapters", "other")

_ADAPTER = re.compile(r"lora_|ia3_|adapter|prompt_encoder|prefix_encoder|vera_|oft_|hada_|lokr_")
_NORM = re.compile(r"(^|[._])(\w*norm\w*|ln(_\w+|\d*)|bn\d*)$", re.IGNORECASE)
_HEAD = re.compile(
    r"(^|\.)(lm_head|embed_out|\w*classifier|score|qa_outputs|cls|predictions|generator_lm_head|output_projection|pooler"
    r"|\w*_head|heads?|out_proj_head|logits_proj)(\.|$)"
)
_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe|shared|patch_projection|relative_attention_bias)(\.|$)")
_ATTENTION = re.compile(
    r"attn|attention|(^|\.)([qkvo](_proj|_lin|)|qkv(_proj)?|query|key|value|c_attn|SelfAttention|EncDecAttention)(\.|$)"
)
_MLP = re.compile(
    r"mlp|ffn|ffw|feed_?forward|experts?|(^|\.)(fc\d?|c_fc|wi(_\d)?|wo|w[123]|lin[12]|intermediate|output\.dense"
    r"|DenseReluDense|(gate|up|down)(_up)?_proj|dense_h_to_4h|dense_4h_to_h|block_sparse_moe|router|gate)(\.|$)",
    re.IGNORECASE,
)
_BY_NAME = {"head": _HEAD, "embeddings": _EMBEDDING, "attention": _ATTENTION, "mlp": _MLP}


def parameter_kinds(shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Divide the parameters of a model.

    Args:
        shapes: each parameter's shape by its name in the state dict.

    Returns:
        One of `PARAMETER_KINDS` for each name. A norm is a module named like one, or one whose `weight` has a single
        dimension.
    """
    return {name: _kind(name, shapes) for name in shapes}


def _kind(name: str, shapes: Mapping[str, Sequence[int]]) -> str:
    if _ADAPTER.search(name):
        return "adapters"
    module, _, _ = name.rpartition(".")
    if len(shapes[name]) <= 1 and (_NORM.search(module) or len(shapes.get(f"{module}.weight", (0, 0))) == 1):
        return "norms"
    return next((kind for kind, pattern in _BY_NAME.items() if pattern.search(name)), "other")
