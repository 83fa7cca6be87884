"""`python docs/drawings [FOLDER]`: draw every picture of the documentation, in its light and its dark version."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import matplotlib
from style import RC, THEMES, save

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "images"


def main(folder: Path) -> None:
    """Draw what every other file here draws into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(HERE.glob("*.py")):
        if path.stem in ("__main__", "style"):
            continue
        drawing = import_module(path.stem)
        for theme in THEMES:
            with matplotlib.rc_context(RC):
                drawn = drawing.draw(theme)
            save(drawn, folder / f"{path.stem.replace('_', '-')}{theme.suffix}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
