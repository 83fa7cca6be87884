"""Which layers of a Llama `cast_model` keeps in FP32, read off a model that it has cast."""

from __future__ import annotations

import functools

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import Theme, figure

import hf_lowprec

LAYERS = (
    ("model.embed_tokens", "token embedding"),
    ("model.rotary_emb", "rotary embedding"),
    ("model.layers.0.input_layernorm", "norm"),
    ("model.layers.0.self_attn.q_proj", "q, k, v"),
    ("model.layers.0.self_attn.o_proj", "output projection"),
    ("model.layers.0.post_attention_layernorm", "norm"),
    ("model.layers.0.mlp.gate_proj", "gate, up"),
    ("model.layers.0.mlp.down_proj", "down"),
    ("model.norm", "final norm"),
    ("lm_head", "head"),
)
BLOCK = range(2, 8)  # of `LAYERS`, those that are repeated


@functools.cache
def dtypes() -> dict[str, torch.dtype]:
    """The dtype of each of `LAYERS` after the cast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    hf_lowprec.cast_model(model)
    found = {}
    for name, _ in LAYERS:
        module = model.get_submodule(name)
        (found[name],) = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}
    return found


def draw(theme: Theme) -> Figure:
    """The layers from top to bottom, in the colour of their dtype."""
    found, (ax,) = figure(theme, 5.4)
    found.subplots_adjust(left=0.01, right=0.99, top=0.995, bottom=0.005)
    colors = {torch.bfloat16: theme.kahan, torch.float32: theme.nearest}
    inside = "#ffffff" if theme.suffix == "" else "#15181f"
    places = []
    y = 0.0
    for k, (name, label) in enumerate(LAYERS):
        y += 0.45 if k in (BLOCK.start, BLOCK.stop) else 0.0
        places.append(y)
        color = colors[dtypes()[name]]
        drawn = FancyBboxPatch((0.8, y), 2.1, 0.62, boxstyle="round,pad=0,rounding_size=0.1", color=color, linewidth=0)
        drawn.set_gid(f"{name}-{str(dtypes()[name]).removeprefix('torch.')}")
        ax.add_patch(drawn)
        ax.text(1.85, y + 0.32, label, color=inside, ha="center", va="center")
        y += 0.86
    top, bottom = places[BLOCK.start] - 0.22, places[BLOCK.stop - 1] + 0.84
    frame = FancyBboxPatch(
        (0.55, top), 2.6, bottom - top, boxstyle="round,pad=0,rounding_size=0.12",
        fill=False, edgecolor=theme.faint, linewidth=1.2, linestyle=(0, (4, 3)),
    )  # fmt: skip
    ax.add_patch(frame)
    ax.text(0.42, (top + bottom) / 2, "each block", color=theme.faint, rotation=90, ha="center", va="center")
    ax.text(3.35, places[0] + 0.2, "BF16", color=theme.kahan, weight="bold", va="center", fontsize=13)
    ax.text(3.35, places[0] + 0.62, "weights, inputs,\noutputs", color=theme.ink, va="top", fontsize=10)
    y = places[2]
    ax.text(3.35, y + 0.1, "FP32", color=theme.nearest, weight="bold", va="center", fontsize=13)
    note = "weights and\narithmetic; input\nupcast, output\ndowncast to BF16"
    ax.text(3.35, y + 0.52, note, color=theme.ink, va="top", fontsize=10)
    ax.set(xlim=(0.2, 5.0), ylim=(places[-1] + 0.75, -0.1), xticks=[], yticks=[])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return found
