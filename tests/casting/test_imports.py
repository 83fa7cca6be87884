"""Casting needs torch and nothing else."""

import ast
from pathlib import Path

from hf_lowprec import casting


def test_only_torch_is_imported() -> None:
    tree = ast.parse(Path(casting.__file__).read_text())
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in modules} & {"transformers", "accelerate", "peft", "hf_lowprec"}
