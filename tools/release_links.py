"""Write the address of the repository into a checkout, before a release is built from it.

    python -m tools.release_links https://github.com/OWNER/NAME v0.1.0

`pyproject.toml` gets `[project.urls]`. `README.md` gets badges, and its relative links become absolute, since a package
index shows the page without the files next to it. The notebook gets the address that it clones. The repository itself
does not say where it is hosted.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^()\s]+)\)")
"""A link or an image of Markdown with a relative address."""

IMAGE = re.compile(r'\b(src|srcset)="(?!https?:)([^"\s]+)"')
"""The relative address of an image in HTML, which can have a width and a dark version."""


BADGES = """
[![Tests]({url}/actions/workflows/ci.yml/badge.svg)]({url}/actions/workflows/ci.yml)
[![Documentation](https://img.shields.io/badge/docs-online-blue)]({site})
[![License](https://img.shields.io/badge/license-Apache--2.0-blue)]({url}/blob/{tag}/LICENSE)
[![Python](https://img.shields.io/badge/python-3.10+-blue)]({url}/blob/{tag}/pyproject.toml)
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})
"""
"""Below the title of `README.md`."""
COLAB = "https://colab.research.google.com/github/{path}/blob/{tag}/examples/quickstart.ipynb"


def write_links(root: Path, url: str, tag: str, site: str) -> None:
    """Write the links into the checkout in `root`.

    Args:
        root: the folder of `pyproject.toml` and `README.md`.
        url: the repository's address.
        tag: the tag of the release; links show the files as they were then.
        site: the address of the documentation.
    """
    urls = {
        "Homepage": site,
        "Documentation": site,
        "Source": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    project = root / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(
        text.replace("[project.scripts]", f"[project.urls]\n{lines}\n[project.scripts]"), encoding="utf-8"
    )

    def absolute(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        return f"{image}[{label}]({url}/{'raw' if image else 'blob'}/{tag}/{path})"

    readme = root / "README.md"
    text = LINK.sub(absolute, readme.read_text(encoding="utf-8"))
    text = IMAGE.sub(rf'\1="{url}/raw/{tag}/\2"', text)
    title, _, rest = text.partition("\n")
    colab = COLAB.format(path="/".join(url.split("/")[-2:]), tag=tag)
    badges = BADGES.format(url=url, site=site, tag=tag, colab=colab)
    readme.write_text(f"{title}\n{badges}{rest}", encoding="utf-8")

    notebook = root / "examples" / "quickstart.ipynb"
    cells = notebook.read_text(encoding="utf-8")
    notebook.write_text(cells.replace('REPOSITORY = \\"\\"', f'REPOSITORY = \\"{url}\\"'), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="the repository's address")
    parser.add_argument("tag", help="the tag of the release")
    parser.add_argument("--site", help="the address of the documentation; default: the repository's")
    options = parser.parse_args()
    write_links(Path(), options.url.rstrip("/"), options.tag, options.site or options.url)


if __name__ == "__main__":
    main()
