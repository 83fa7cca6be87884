"""A figure as an SVG element of a page, which takes its font and its colours from the page's style."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib
from matplotlib.figure import Figure

_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def inline_svg(figure: Figure, name: str, description: str, variables: Mapping[str, str]) -> Element:
    """Convert a figure.

    Args:
        figure: whatever it draws of run 2 has the id `run-2`, which becomes a class.
        name: distinguishes the ids of this figure from those of others in the page.
        description: for those who cannot see it.
        variables: the colour of each CSS variable. Where the figure uses that colour, the SVG uses the variable.
    """
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    names = {colour: f"var({variable})" for variable, colour in variables.items()}
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)  # the latter would apply to the whole page
        parent.tag = parent.tag.partition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in parent.attrib.items()}
        parent.attrib.clear()
        parent.attrib.update(_for_page(attributes, name, names))
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": description}
    return root


def _for_page(attributes: dict[str, str], name: str, colours: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for key, value in attributes.items():
        if key == "id":
            # Defined shapes have ids like m12345abc and p12345abc; those of other elements are not referred to.
            if re.fullmatch(r"run-\d+", value):
                found["class"] = value
            elif re.fullmatch(r"[mpC][0-9a-f_]{8,}\w*", value):
                found["id"] = f"{name}-{value}"
        elif key == "href":
            found[key] = f"#{name}-{value[1:]}"
        elif key not in ("version",):
            value = re.sub(r"#[0-9a-f]{6}\b", lambda colour: colours.get(colour[0], colour[0]), value)
            value = _REFERENCE.sub(rf"url(#{name}-\1)", value)
            found[key] = re.sub(r"(font: [\d.]+px) [^;]+", r"\1 var(--font)", value)
    return found
