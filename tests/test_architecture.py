"""Imports go down only, never in a circle, and the other rules of the package's shape, read from its source with `ast`.

| layer | units | may import |
| --- | --- | --- |
| L0 | rounding, import_hook, oldest_versions, once, tensor_names, wrapped_method | itself |
| L1 | optim, casting, reduction, monitor | itself and L0; monitor also optim and casting |
| L2 | integrations | L0 and L1; alone in importing accelerate and peft, or private names of transformers |
| L3 | tools, one unit per folder or file | itself and L0 to L2; `tools.cli` also the others |
| L4 | `__main__` | tools.cli, oldest_versions |

So nothing that trains imports a tool. Tools import public names of transformers.

Triton is imported by the two modules of handwritten kernels, `KERNELS`, which no module imports at its top.
`hf_lowprec/__init__.py` hands out names of every layer, lazily; only the rules on other packages, and on circles, bind
it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = "hf_lowprec"
ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(p for p in (ROOT / PACKAGE).rglob("*") if p.suffix in {".py", ".c", ".cpp", ".cu", ".h"})
MODULES = [p for p in FILES if p.suffix == ".py"]
SHAPELESS_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

CORE = {"rounding", "oldest_versions", "once", "tensor_names", "wrapped_method"}
CORE |= {"optim", "casting", "reduction", "monitor", "integrations"}
MAY_IMPORT = {
    "import_hook": {"import_hook"},
    "oldest_versions": {"oldest_versions"},
    "once": {"once"},
    "tensor_names": {"tensor_names"},
    "wrapped_method": {"wrapped_method"},
    "rounding": {"rounding"},
    "optim": {"optim", "rounding", "once"},
    "casting": {"casting", "rounding", "once", "wrapped_method"},
    "reduction": {"reduction", "rounding"},
    "monitor": {"monitor", "optim", "casting", "rounding", "once", "tensor_names"},
    "integrations": CORE,
    "__main__": {"tools.cli", "oldest_versions"},
}
COMMANDS = ("inspection", "machine_checks", "prediction", "estimate", "plotting")
TOOLS = {**{tool: {tool} for tool in COMMANDS}, "cli": {"cli", *COMMANDS}}
PROGRAMS = {"__main__", *(f"tools.{tool}" for tool in TOOLS)}
"""The units behind the command line, which use this package and transformers by their public names."""
for tool, others in TOOLS.items():
    MAY_IMPORT[f"tools.{tool}"] = {*CORE, *(f"tools.{other}" for other in others)}
OPTIM = (
    *("private_torch_apis", "sharding", "arguments", "algorithm_interface", "validation"),
    *("param_groups", "state", "step", "backends", "gradients", "host_steps", "step_stages", "optimizer", "algorithms"),
    "optimizer_names",
)
"""The files and folders of `optim`, from the lowest to the highest."""
KERNELS = {f"{PACKAGE}.optim.backends.triton.{name}" for name in ("handwritten_kernels",)}
KERNELS |= {f"{PACKAGE}.reduction.rank_mean_kernel"}
"""The modules that need triton to be imported."""
HUGGING_FACE = {"transformers", "accelerate", "peft"}


@dataclass(frozen=True)
class Import:
    target: str  # absolute and dotted; for `from a import b` it is "a.b"
    line: int
    at_import_time: bool

    @property
    def parts(self) -> list[str]:
        return self.target.split(".")


def _not_run(node: ast.AST) -> list[ast.AST]:
    """The children of a node that importing the module does not run."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.body]
    if isinstance(node, ast.Lambda):
        return [node.body]
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        return [*node.body]
    return []


def _walk(node: ast.AST, runs: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """A node and all below it, each with whether importing the module runs it."""
    yield node, runs
    asleep = _not_run(node)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, runs and child not in asleep)


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a module, by statement or by `import_module("…")`, relative ones made absolute."""
    package = (module if is_package else module.rpartition(".")[0]).split(".")

    def absolute(dots: int, name: str) -> str:
        above = package[: len(package) - dots + 1] if dots else []
        return ".".join([*above, *([name] if name else [])])

    for node, runs in _walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, runs)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.level, node.module or "")
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, runs)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called, name = ast.unparse(node.func).rpartition(".")[2], node.args[0].value
            if called in {"import_module", "__import__"} and isinstance(name, str):
                dots = len(name) - len(name.lstrip("."))
                yield Import(absolute(dots, name[dots:]), node.lineno, runs)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _private_attributes(tree: ast.Module, library: str) -> Iterator[tuple[str, int]]:
    """`library.a._b` spelled out in the code, whatever name the library was imported as."""
    names = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] == library
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            spelled = ast.unparse(node)
            if spelled.partition(".")[0] in names:
                yield spelled, node.lineno


def unit_of(module: str) -> str:
    """The unit that a module or a name in it belongs to: a folder of the package, or one of its `tools`."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["tools"] else 1])


def _is_in_optim(parts: list[str]) -> bool:
    return parts[:2] == [PACKAGE, "optim"] and {*parts[2:3]} <= {*OPTIM} and len(parts) > 2


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The violations of the rules by `source`, as the module of that dotted name: one line each."""
    tree = ast.parse(source)
    unit = unit_of(module)
    found = []
    if unit not in {"", "tools", *MAY_IMPORT}:
        found.append(f"{module} belongs to no layer")
    for imported in imports(tree, module, is_package):
        where, library = f"{module}:{imported.line}", imported.parts[0]
        if library == PACKAGE and unit in MAY_IMPORT:
            target = unit_of(imported.target)
            if target in MAY_IMPORT and target not in MAY_IMPORT[unit]:
                found.append(f"{where} imports {imported.target}, and {unit} may not import {target}")
            elif target not in MAY_IMPORT and unit not in PROGRAMS:
                found.append(f"{where} imports {imported.target} from the top of the package, which knows all layers")
        inside = [OPTIM.index(parts[2]) for parts in (module.split("."), imported.parts) if _is_in_optim(parts)]
        if inside != sorted(inside, reverse=True):
            found.append(f"{where} imports {imported.target}, which is above it in optim")
        if library in HUGGING_FACE and unit != "integrations":
            if library != "transformers" or unit not in PROGRAMS:
                found.append(f"{where} imports {imported.target}, which only integrations may")
            elif any(_is_private(part) for part in imported.parts):
                found.append(f"{where} imports {imported.target}, a private name")
        needs_triton = library == "triton" or any(f"{imported.target}.".startswith(f"{name}.") for name in KERNELS)
        if needs_triton and imported.at_import_time and module not in KERNELS:
            found.append(f"{where} imports {imported.target} at the top level, and with it triton")
    if unit in PROGRAMS:
        found += [
            f"{module}:{line} uses {name}, a private name" for name, line in _private_attributes(tree, "transformers")
        ]
    return found


@dataclass(frozen=True)
class Source:
    """A module's source code, and whether it is the `__init__.py` of a package."""

    text: str
    is_package: bool = False


def circle(sources: Mapping[str, Source]) -> list[str]:
    """Modules that import each other in a circle, `[a, b, a]` if `a` imports `b`; empty if there are none.

    Imports inside of functions and for type checkers only count as well. That Python runs a package's `__init__.py`
    before the package's modules does not.
    """
    graph = {module: _imported_modules(module, sources) for module in sources}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def _imported_modules(module: str, sources: Mapping[str, Source]) -> set[str]:
    """Those of `sources` that `module` imports, or imports a name from."""
    found = set()
    source = sources[module]
    for imported in imports(ast.parse(source.text), module, source.is_package):
        candidates = (imported.target, imported.target.rpartition(".")[0])
        found.add(next(filter(sources.__contains__, candidates), module))
    return found - {module}


def name_violations(path: Path) -> list[str]:
    """Parts of a file's path that say nothing about its content."""
    return [f"{path}: '{part}' says nothing" for part in path.parts if _stem(part) in SHAPELESS_NAMES]


def _stem(part: str) -> str:
    return part.partition(".")[0].strip("_")


def _module_name(path: Path) -> tuple[str, bool]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def test_the_package_is_where_this_file_looks() -> None:
    units = {_module_name(p)[0].split(".")[1] for p in MODULES if p.parent != ROOT / PACKAGE or p.stem != "__init__"}
    assert {"rounding", "optim"} <= units
    of_optim = {
        p.relative_to(ROOT / PACKAGE / "optim").parts[0].removesuffix(".py") for p in MODULES if "optim" in p.parts
    }
    assert of_optim - {"__init__"} == {*OPTIM}


def test_imports_go_down_only_and_never_in_a_circle() -> None:
    sources = {}
    for path in MODULES:
        module, is_package = _module_name(path)
        sources[module] = Source(path.read_text(encoding="utf-8"), is_package)
    found = [line for module, source in sources.items() for line in violations(source.text, module, source.is_package)]
    assert found == []
    assert circle(sources) == []


def test_what_runs_in_a_step_caches_properties_without_a_lock() -> None:
    """A forked child would wait for it if another thread held it; see `once.cached_property`."""
    in_a_step = [path for path in MODULES if path.relative_to(ROOT).parts[1] in ("optim", "monitor")]
    assert not [path for path in in_a_step if "functools import cached_property" in path.read_text(encoding="utf-8")]


def test_files_are_named_for_what_they_do() -> None:
    assert [line for path in FILES for line in name_violations(path.relative_to(ROOT))] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rounding.modes", "import hf_lowprec.optim"),
        ("rounding.modes", "from .. import optim"),
        ("rounding.modes", "def f():\n    from hf_lowprec.casting import cast_model"),
        ("rounding.modes", "from hf_lowprec import AdamW"),
        ("optim.optimizer", "if TYPE_CHECKING:\n    from hf_lowprec.casting import Report"),
        ("optim.optimizer", "import importlib\nimportlib.import_module('..monitor', __package__)"),
        ("optim.state.state_dict", "if TYPE_CHECKING:\n    from hf_lowprec.optim.optimizer import step"),
        ("casting", "import transformers"),
        ("reduction.ddp", "def f():\n    import accelerate.utils"),
        ("integrations.transformers.trainer", "from hf_lowprec.tools.cli import main"),
        ("tools.cli.run", "import accelerate"),
        ("tools.estimate.memory", "from hf_lowprec.tools import machine_checks"),
        ("tools.cli.run", "from transformers.trainer import _private"),
        ("tools.cli.run", "import transformers as t\nt.trainer._private()"),
        ("optim.backends.triton.launch", "try:\n    import triton.language as tl\nexcept ImportError:\n    tl = None"),
        ("optim.backends.triton.launch", "class Kernels:\n    from triton import jit"),
        ("optim.backends.triton.launch", "from hf_lowprec.optim.backends.triton import handwritten_kernels"),
        ("odds", "x = 1"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, f"{PACKAGE}.{module}")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("optim.optimizer", "import torch\nfrom ..rounding import modes\nfrom .step.plan import StepPlan"),
        ("integrations.transformers.trainer", "from transformers.trainer import _private\nimport accelerate, peft"),
        ("tools.cli.run", "from hf_lowprec import __version__\nfrom transformers import AutoConfig, __version__"),
        ("__main__", "from hf_lowprec.tools.cli import main"),
        ("optim.backends.triton.launch", "if TYPE_CHECKING:\n    import triton"),
        ("optim.backends.triton.launch", "def kernels():\n    import triton\n    return triton.jit"),
        ("optim.backends.triton.handwritten_kernels", "import triton"),
    ],
)
def test_what_the_rules_allow_is_not_reported(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []


@pytest.mark.parametrize(
    "planted",
    [
        {"p.a": Source("import p.b"), "p.b": Source("def f():\n    from . import a")},
        {"p.a": Source("from p.b import B"), "p.b": Source("if TYPE_CHECKING:\n    from p.a import A")},
        {"p.a": Source("import importlib\nimportlib.import_module('.b', 'p')"), "p.b": Source("import p.a")},
        {"p": Source("from .a import A", is_package=True), "p.a": Source("from . import A")},
        {"p.a": Source("from p.b import B"), "p.b": Source("from p.c import C"), "p.c": Source("from p.a import A")},
    ],
    ids=["inside a function", "for types only", "import_module", "package", "three modules"],
)
def test_a_planted_circle_is_found(planted: dict[str, Source]) -> None:
    found = circle(planted)
    assert found[0] == found[-1]
    assert sorted(found[1:]) == sorted(planted)
    for importer, imported in pairwise(found):
        assert imported in _imported_modules(importer, planted)


def test_what_is_no_circle_is_not_reported() -> None:
    sources = {
        "p": Source("from p.a import A", is_package=True),
        "p.a": Source("from p.b import B\nfrom . import b, c"),
        "p.b": Source("from p.c import C\nimport torch"),
        "p.c": Source("import os.path"),
    }
    assert circle(sources) == []


def test_relative_imports_of_a_package_start_at_the_package_whose_top_imports_no_other_library() -> None:
    assert len(violations("import triton", PACKAGE, is_package=True)) == 1
    assert violations("from .optimizer import LowPrecisionOptimizer", f"{PACKAGE}.optim", is_package=True) == []
    assert len(violations("from .. import casting", f"{PACKAGE}.optim", is_package=True)) == 1


def test_a_planted_name_is_found() -> None:
    assert name_violations(Path("hf_lowprec/optim/algorithms/adamw.py")) == []
    for bad in ("hf_lowprec/optim/_helpers.cpp", "hf_lowprec/common/math.py"):
        assert len(name_violations(Path(bad))) == 1
