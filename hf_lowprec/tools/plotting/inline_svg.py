"""A figure as an SVG element of a page, which takes its font and its colours from the page's style."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
from matplotlib.figure import Figure

_REFERENCE = re.compile(r"(?<=url\(#)[^)]+(?=\))|(?<=^#)[\w-]+$")
"""The id that a value of an attribute refers to."""
_LONG_DECIMALS = re.compile(r"(\.\d\d)\d+")


def inline_svg(
    figure: Figure, name: str, description: str, variables: Mapping[str, str], titles: Mapping[str, str]
) -> Element:
    """Convert a figure.

    Args:
        figure: any.
        name: distinguishes the ids of this figure from those of others in the page.
        description: for those who cannot see it.
        variables: the colour of each CSS variable. Where the figure uses that colour, the SVG uses the variable.
        titles: for artists whose id (`set_gid`) is a key: the text that appears when the mouse points at them. Their
            id becomes a class, since it may occur in many figures.
    """
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    colours = {colour: f"var({variable})" for variable, colour in variables.items()}
    referred = {found[0] for element in root.iter() for value in element.attrib.values()
                if (found := _REFERENCE.search(value))}  # fmt: skip
    for element in list(root.iter()):
        for child in [child for child in element if child.tag.endswith(("}metadata", "}style"))]:
            element.remove(child)  # the latter would apply to the whole page
        element.tag = element.tag.partition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        group = attributes.pop("id", "")
        if group in referred:
            element.set("id", f"{name}-{group}")
        elif group in titles:
            element.set("class", group)
            element.insert(0, title := Element("title"))
            title.text = titles[group]
        for key, value in attributes.items():
            value = re.sub(r"#[0-9a-f]{6}\b", lambda colour: colours.get(colour[0], colour[0]), value)
            value = _REFERENCE.sub(rf"{name}-\g<0>", value)
            element.set(key, _LONG_DECIMALS.sub(r"\1", value))
        element.tail = None
        if element.tag not in ("text", "tspan", "title"):
            element.text = None
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": description}
    return root
