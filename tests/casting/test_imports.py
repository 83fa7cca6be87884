"""Casting needs torch and the package's lowest layer, which itself needs nothing but torch."""

import ast
from pathlib import Path

from hf_lowprec import casting, rounding


def test_only_torch_is_imported() -> None:
    files = [path for package in (casting, rounding) for path in sorted(Path(package.__file__).parent.rglob("*.py"))]
    assert {"cast.py", "norms.py", "nearest.py"} <= {path.name for path in files}
    trees = [ast.parse(path.read_text()) for path in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    inside = ("hf_lowprec.casting.", "hf_lowprec.rounding.", "hf_lowprec.once.")
    outside = {name for name in modules if not f"{name}.".startswith(inside)}
    assert not {name.split(".")[0] for name in outside} & {"transformers", "accelerate", "peft", "hf_lowprec"}
