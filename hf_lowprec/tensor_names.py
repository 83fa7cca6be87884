"""Names of tensors in messages: tensors of several layers in one word, long lists cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

NAMES_IN_MESSAGE = 4
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def listed(names: Iterable[str]) -> str:
    """Return the first few names, with several layers in one (`layers.0-3.mlp.weight`), and how many more there are."""
    layers: dict[str, list[int]] = {}
    for name in names:
        found = _LAYER.search(name)
        numbers = layers.setdefault(name_pattern(name), [])
        numbers += [int(found[0])] if found else []
    patterns = [pattern.replace("*", _ranges(numbers), 1) for pattern, numbers in layers.items()]
    counts = [max(1, len(numbers)) for numbers in layers.values()]
    more = sum(counts[NAMES_IN_MESSAGE:])
    return ", ".join(patterns[:NAMES_IN_MESSAGE]) + (f" and {more} more" if more else "")


def name_pattern(name: str) -> str:
    """Return a tensor's name with a star for the number of its layer: one pattern for all layers."""
    return _LAYER.sub("*", name, count=1)


def layer_number(name: str) -> int:
    """Return the number of the layer that a tensor belongs to; -1 outside of layers."""
    found = _LAYER.search(name)
    return int(found[0]) if found else -1


def _ranges(numbers: list[int]) -> str:
    """Format numbers as ranges: "0-2,5"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


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
