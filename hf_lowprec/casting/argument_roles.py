"""The role of each argument of a `forward`, by its name and shape: only activations and masks are rounded to 16 bits.

Rounding changes numbers: in BF16, 257 tokens are 256, timestep 999 is 1000, column 1001 is 1000.
"""

import functools
import re
from typing import Literal

import torch

_TIMES = "t ts time times timestep timesteps timestamp timestamps step steps second seconds"
NUMBERS = {
    "weight weights": "weigh classes, samples or tokens in a loss",
    "guidance": "how strongly a diffusion follows its prompt",
    "temperature temperatures scale scales rate rates": "multiply or divide what the model computes",
    _TIMES: "points in time",
    "sigma sigmas alpha alphas beta betas snr noise": "the schedule of a diffusion, and what it mixes in and predicts",
    "pos position positions coord coords coordinate coordinates": "positions",
    "box boxes bbox bboxes point points": "positions in an image or on a page, in pixels or as shares of its size",
    "flattened": "patches of an image, led by their row and column",
    "num number numbers count counts length lengths size sizes": "counts",
    "numeric answer answers": "numbers out of a text, which a loss compares",
    "past future": "observations in a unit of their own, which a series model scales, reads and predicts",
    "reward rewards return returns advantage advantages": "what actions earn, which weighs them in a loss",
}
"""Words in an argument's name that make it a number, whatever its shape, and what they stand for."""

COMPUTED = {
    "embed embeds emb embedding embeddings encoding encodings bias": "made of numbers: `time_embeds`, `position_bias`",
    "state states key logits": "made of hidden states: `past_key_values`",
    "feature features feats hidden": "made of inputs by layers: `point_features`, `past_hidden`",
    "reference": "`reference_points`: a decoder of DETR's kind predicts and refines them itself",
}
"""Words that mark an argument as an activation even if it contains a word of `NUMBERS`."""

_NUMBERS, _COMPUTED = (frozenset(" ".join(table).split()) for table in (NUMBERS, COMPUTED))
_WORDS = re.compile(r"t5|[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

Role = Literal["activation", "mask", "number", "reference"]


@torch.compiler.assume_constant_result
def role_of(name: str, dims: int) -> Role:
    """Classify a floating argument of `forward` by the first rule that applies:

    - a *reference* has "label" or "target" in its name: a loss compares with it, so it must not be rounded;
    - a *number* has no dimensions or one, since activations have one for the batch and one for the features;
    - a *mask* has "mask" in its name: it is added to scores or multiplied by activations, so it gets their dtype;
    - a *number* has a word in its name that says so (`NUMBERS`);
    - everything else is an *activation*.

    Args:
        name: the argument's; for a tensor in a dict, the argument's name and the keys, joined by dots.
        dims: how many dimensions the tensor has.
    """
    role = _role_by_name(name)
    return "number" if role in ("activation", "mask") and dims < 2 else role


@functools.lru_cache(maxsize=4096)
def _role_by_name(name: str) -> Role:
    # A key names its value, but labels stay labels whatever their keys are called.
    parts = [(part.lower(), words_of(part)) for part in name.split(".")]
    # A mapping of positions to targets (XLNet) is a matrix that activations are multiplied by.
    if any(("label" in part or "target" in part) and "mapping" not in words for part, words in parts):
        return "reference"
    if "mask" in name.lower():
        return "mask"
    return "number" if any(_names_numbers(words) for _, words in parts) else "activation"


def names_numbers(name: str) -> bool:
    """Return whether a buffer holds numbers: its name has a word of `NUMBERS`, or a word for frequencies."""
    words = words_of(name)
    return _names_numbers(words) or not {"freq", "freqs", "frequency", "frequencies"}.isdisjoint(words)


@torch.compiler.assume_constant_result
def is_time(name: str) -> bool:
    """Return whether an argument holds timesteps, by its name's last word: `timesteps` and `t`, but not `time_ids`.

    Guidance scales count as well, because diffusion models embed them like timesteps.
    """
    return _is_time(name)


@functools.lru_cache(maxsize=4096)
def _is_time(name: str) -> bool:
    return not set(words_of(name)[-1:]).isdisjoint({"guidance", *_TIMES.split()})


def _names_numbers(words: list[str]) -> bool:
    """Return whether a name stands for numbers themselves, rather than for something computed from them."""
    if _NUMBERS.isdisjoint(words):
        return False
    if _COMPUTED.isdisjoint(words) or {"time", "features"} <= set(words):  # `past_time_features`: times of a series
        return True
    # The last word is the noun: `feature_weights` are weights.
    return words[-1] in _NUMBERS and "reference" not in words


def words_of(name: str) -> list[str]:
    """Split a name into lower-case words at underscores, dots, digits and capitals.

    T5 is a text encoder, not a time.
    """
    return [word.lower() for word in _WORDS.findall(name)]
