"""A tiny config of any architecture of transformers: its own defaults, shrunk by the names of the fields.

`SIZES` maps names to the largest value kept. Where names are not enough, `config_fields.py` has the fields of a model
type or class.
"""

import importlib.util
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.support.every_architecture.config_fields import CLASS_FIELDS, FIELDS

VOCABULARY, CODES, WIDTH, HEADS, LAYERS, IMAGE = 96, 64, 64, 4, 2, 32
FIRST_TOKEN = 64  # of the texts; smaller numbers are for pad_token_id, image_token_id, …

Field = int | list[Any] | tuple[Any, ...]

# The first that matches the name and then the value: a pattern for the whole name, and the largest integer kept.
SIZES: list[tuple[str, int]] = [
    (r".*codebook_size|num_embeddings|num_codevectors.*", CODES),
    (r"(.*_)?vocab_size(_.*)?|head_out_channels", VOCABULARY),
    (r"query_pre_attn_scalar|rotary_dim", WIDTH // HEADS),
    (r"coordinate_size", 12),  # four of them and two of the next make the width
    (r"shape_size", 8),
    (r"upsample_groups", WIDTH),
    (r"mamba_n_heads|mamba_num_heads", 2 * HEADS),
    (r"index_topk", 8),
    (r"mm_tokens_per_image", 16),
    (r"first_k_dense_replace", 1),
    (r"qk_head_dim", 2 * WIDTH // HEADS),  # a part that is rotated beside one that is not
    (r"type_vocab_size|(num_)?(hidden_)?groups|n_groups?|topk_group|num_feat_extract_layers", 2),
    (r"(num_|n_)?(key_value|kv|query)_heads?|num_attention_groups|num_key_heads|linear_num_key_heads", HEADS // 2),
    (r".*(head_dim|d_kv|dim_head|d_head|head_size)", WIDTH // HEADS),
    (r".*heads?", HEADS),
    (r".*(num_experts_per_tok|moe_topk|moe_k|top_?k|num_activated_experts)(_experts)?", 2),
    (r".*(num|n|local|routed)_.*experts|num_experts|moe_num_experts", HEADS),
    (r".*shared_experts", 1),
    (r"image_size|.*_image_size|img_size|input_size", IMAGE),
    (r".*patch_size|tubelet_size", 8),
    (r"sliding_window|attention_window|local_attention|chunk_size|mamba_chunk_size|.*block_size", 8),
    (r".*(max|n)_.*positions?(_embeddings)?|max_length|context_length|seq_length|max_seq_len", 128),
    (r"num_position_embeddings", 256),
    (r".*(lora_rank|time_step_rank|low_rank_dim|lora_.*dim|state_size|d_state|ssm_state_size)", 8),
    (r".*(layers?|layers?_num|blocks?|depth)", LAYERS),
    (r"num_(object_)?quer(y|ies)(_tokens)?|num_latents|num_proposals", 8),
    (r".*(intermediate|ffn|d_ff|mlp_dim|ff_dim|inner).*", 2 * WIDTH),
    (r"conv_dim|num_filters|upsample_initial_channel|base_channels|hidden_channels|n_inner|.*_channels", WIDTH),
    (r".*(hidden|embed|width|d_model|proj|n_embd|_dim|latent|channels|emb).*", WIDTH),
    (r"dim|num_mel_bins|n_mels|feature_size|max_rel.*|num_bins", WIDTH),
    (r"train_num_points|num_denoising|num_negatives|num_parallel_samples", 8),
]
KEPT = re.compile(
    r".*(initializer|stride|kernel|padding|ratio|factor|multiplier|dropout|prob|theta|eps|temperature|version).*"
    r"|num_labels|num_channels|audio_channels|mask_token_type|encode_proj_layers|num_encoder_blocks|max_pos_emb|feature_projection_input_dim|bridge_layer.*"
)
WIDTHS = re.compile(r".*(hidden|embed|width|dim|channels|sizes|filters).*")
# Where a config leaves to None what its model needs.
FILLED = {
    **{"pad_token_id": 0, "vocab_size": VOCABULARY, "head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS // 2},
    **{"moe_intermediate_size": WIDTH, "n_routed_experts": HEADS, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
TOKEN = re.compile(r"(?!moe_layer).*(token_(id|index)|_id|_index|_idx)s?|.*(bos|eos|pad|boi|eoi)_token.*")


def size_of(name: str, value: int) -> int:
    """The tiny value for an integer field of that name."""
    if KEPT.fullmatch(name):
        return value
    if name == "window_size":  # of pixels in some models, of patches in most
        return IMAGE if value > 16 else min(value, 2)
    return min(value, next((most for pattern, most in SIZES if re.fullmatch(pattern, name)), value))


def sizes_of(name: str, values: Any, stages: bool) -> Any:
    """The same for a list, whose length stays: stages of a growing width, one block in each."""
    if KEPT.fullmatch(name) or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return values
    if re.fullmatch(r"depths?|layers|.*num_blocks|.*_layers|layer_depths|.*_depths", name):
        return type(values)(min(v, 1) for v in values)
    if re.fullmatch(r".*(indices|index(es)?|feature_layers?)", name):
        if stages:
            return values
        return type(values)(sorted({max(min(v, LAYERS - 1), -LAYERS) for v in values}))
    if re.fullmatch(r".*heads", name):
        ranks = sorted(set(values))
        return type(values)(2 ** min(ranks.index(v), 3) for v in values)
    if re.fullmatch(r".*(image_size|img_size|input_size)", name):
        return type(values)(IMAGE for _ in values)
    return [eighth(v) for v in values] if WIDTHS.fullmatch(name) else values


def eighth(width: int) -> int:
    """A width of a network of many widths: what was equal stays so, and so do most ratios."""
    return width if width <= 8 else max(8, width // 8 - width // 8 % (8 if width >= 256 else 4))


def has_many_widths(config: PreTrainedConfig) -> bool:
    """Whether widths come as lists, one for each stage."""
    lists = ((k, v) for k, v in vars(config).items() if isinstance(v, list | tuple) and WIDTHS.fullmatch(k))
    return any(v and all(isinstance(i, int) for i in v) and max(v) >= 16 for _, v in lists)


class Tokens:
    """Small numbers for special tokens, the same for the same name everywhere in a config."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"pad": 0, "bos": 1, "eos": 2}

    def of(self, name: str, value: int) -> int:
        name = re.sub(r"_(token_)?(id|index|idx)$", "", name)
        if value < 0 or (name in ("pad", "bos", "eos") and value < FIRST_TOKEN):
            return value
        return self.numbers.setdefault(name, len(self.numbers))


def tiny_fields(config: PreTrainedConfig, tokens: Tokens, own: Container[str] = ()) -> dict[str, Any]:
    """The fields with which `type(config)` makes a tiny one. What it derives from others, unless in `own`, is its."""
    fields: dict[str, Any] = _layers(config)
    given = FIELDS.get(config.model_type, {})
    many = has_many_widths(config)
    for name, value in vars(config).items():
        if name.startswith("_") or name in (*fields, "transformers_version", "dtype", "id2label", "label2id"):
            continue
        derived = getattr(type(config), name, None) is None and name not in _listed(config) and name not in own
        new = value
        if isinstance(value, PreTrainedConfig):
            changed = _changed(value)
            new = changed | tiny_fields(value, tokens, changed) | {"model_type": value.model_type}
        elif name == "rope_parameters" and isinstance(value, dict):
            new = _rotary(value, _asks_sections(config))
        elif value is None:
            new = FILLED.get(name)
        elif isinstance(value, list | tuple) and value and (not derived or many):
            new = sizes_of(name, value, many)
        elif derived or isinstance(value, bool):
            continue
        elif isinstance(value, int):
            new = _integer(config, name, value, many, tokens)
        elif isinstance(value, float) and re.search(r"drop|mask_(time|feature)_prob", name):
            new = 0.0
        if new is not value and new != value:
            fields[name] = new
    return _merged(fields, given)


def _integer(config: PreTrainedConfig, name: str, value: int, many: bool, tokens: "Tokens") -> int:
    if TOKEN.fullmatch(name):
        return tokens.of(name, value)
    if name == "num_key_value_heads" and value == getattr(config, "num_attention_heads", None):
        return size_of("num_attention_heads", value)
    return eighth(value) if many and WIDTHS.fullmatch(name) else size_of(name, value)


def _layers(config: PreTrainedConfig) -> dict[str, Any]:
    """Few layers of which every kind is one, for a config that lists the kind of each layer."""
    count = getattr(config, "num_hidden_layers", None)
    kinds = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count and value and isinstance(value[0], str)
    }
    if not kinds:
        return {}
    chosen: list[int] = []
    for i in range(count):
        if any(value[i] not in [value[j] for j in chosen] for value in kinds.values()):
            chosen.append(i)
    chosen = chosen if len(chosen) >= LAYERS else [0, 1][:count]
    depth = next((n for n in ("num_hidden_layers", "num_layers", "n_layer") if n in vars(config)), "num_hidden_layers")
    return {depth: len(chosen)} | {name: [value[i] for i in chosen] for name, value in kinds.items()}


def _rotary(parameters: dict[str, Any], sections: bool) -> dict[str, Any]:
    """Rotary parameters, whose sections of frequencies share half of what is rotated of a head."""
    new = {name: _rotary(value, sections) if isinstance(value, dict) else value for name, value in parameters.items()}
    count = len(new.get("mrope_section") or [0] * 3 * sections)
    if count and parameters and not any(isinstance(value, dict) for value in parameters.values()):
        half = int(WIDTH // HEADS * (new.get("partial_rotary_factor") or 1)) // 2
        rest = [half // 4] * (count - 1)
        new["mrope_section"] = [half - sum(rest), *rest]
    return new


def _asks_sections(config: PreTrainedConfig) -> bool:
    """Whether the model's code has sections of its own for a config without any."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    spec = importlib.util.find_spec(name)
    return spec is not None and "mrope_section" in (Path(spec.origin or "").read_text(encoding="utf-8"))


def _changed(part: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config inside another that are not its class's defaults: the outer config has set them."""
    plain = vars(type(part)())
    fields = getattr(type(part), "__dataclass_fields__", {})
    names = fields.keys() - vars(PreTrainedConfig).keys()
    changed = {
        name: value
        for name, value in vars(part).items()
        if name in names and isinstance(value, bool | int | float | str | list | tuple) and value != plain.get(name)
    }
    stages = getattr(part, "stage_names", None)
    if stages and (has_many_widths(part) or isinstance(getattr(part, "depths", None), list | tuple)):
        changed["out_indices"] = list(part.out_indices)
    return {name: value for name, value in changed.items() if not name.startswith("_")}


def _listed(config: PreTrainedConfig) -> set[str]:
    """Fields with a default made anew for every config: lists."""
    fields = getattr(type(config), "__dataclass_fields__", {})
    return {name for name, field in fields.items() if callable(field.default_factory)}


def _merged(fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    merged = fields | given
    for name in fields.keys() & given.keys():
        if isinstance(fields[name], dict) and isinstance(given[name], dict):
            merged[name] = _merged(fields[name], given[name])
    return merged


def tiny_config(model_class: type, model_type: str, attention: str | None = None) -> PreTrainedConfig:
    """The tiny config of a model type, or the part of it that a class takes; raises whatever its class raises."""
    config_class = CONFIG_MAPPING[model_type]
    start = FIELDS.get(model_type, {}).get("_start", {})
    fields = tiny_fields(config_class(**start), Tokens())
    config = config_class(**_merged(fields, CLASS_FIELDS.get(model_class.__name__, {})))
    wanted = getattr(model_class, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        config = next((part for part in vars(config).values() if isinstance(part, wanted)), config)
    config.use_cache = False
    if attention is not None:
        config._attn_implementation = attention
    return config
