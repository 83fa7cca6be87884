"""Findings: what is wrong in checkpoints, in sentences for users, each with its remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hf_lowprec.diagnostics.finding import Finding

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


def counted(count: int, noun: str) -> str:
    """A number with its noun, as in "1 tensor", "2 tensors"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def finding(code: str, tensors: Iterable[str], message: str, noun: str = "tensor") -> list[Finding]:
    """One finding about some tensors, none if there are no tensors.

    Args:
        code: see `Finding`.
        tensors: see `Finding`.
        message: with `{names}` for the first few names, and `{count}` for "3 tensors".
        noun: what to count instead of tensors.
    """
    names = list(dict.fromkeys(tensors))
    if not names:
        return []
    return [Finding(code, message.format(names=listed(names), count=counted(len(names), noun)), tuple(names))]
