"""Names of tensors in messages: tensors of several layers in one word, long lists cut."""

from __future__ import annotations

import re
from collections.abc import Iterable

NAMES_IN_MESSAGE = 4
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def listed(names: Iterable[str]) -> str:
    """The first few names, those of several layers as one (`layers.0-3.mlp.weight`), and how many more there are."""
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
    """The name of a tensor with a star for the number of its layer, so that tensors of other layers share it."""
    return _LAYER.sub("*", name, count=1)


def layer_number(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1 outside of layers."""
    found = _LAYER.search(name)
    return int(found[0]) if found else -1


def layer(name: str) -> str:
    """The name of the layer that a tensor belongs to; empty outside of layers."""
    found = _LAYER.search(name)
    return name[: found.end()] if found else ""


def _ranges(numbers: list[int]) -> str:
    """Numbers as ranges: "0-2,5"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
