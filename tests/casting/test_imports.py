"""Casting needs torch and nothing else."""

import ast
from pathlib import Path

from hf_lowprec import casting


def test_only_torch_is_imported() -> None:
    files = sorted(Path(casting.__file__).parent.glob("*.py"))
    assert len(files) > 1
    trees = [ast.parse(path.read_text()) for path in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    outside = {name for name in modules if not name.startswith("hf_lowprec.casting.")}
    assert not {name.split(".")[0] for name in outside} & {"transformers", "accelerate", "peft", "hf_lowprec"}
