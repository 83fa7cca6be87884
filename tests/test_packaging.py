"""The pins satisfy the ranges on every Python we name; console script and version are what they say."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import hf_lowprec
from hf_lowprec.oldest_versions import OLDEST

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
OLDEST_CONSTRAINTS = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
PYTHONS = [
    name.rpartition(" ")[2]
    for name in PROJECT["classifiers"]
    if name.startswith("Programming Language :: Python :: 3.")
]
PLATFORMS = {"linux": ("Linux", "x86_64"), "darwin": ("Darwin", "arm64")}


def environment(python: str, platform: str) -> dict[str, str]:
    """The marker environment of a Python version on a platform."""
    system, machine = PLATFORMS[platform]
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": platform,
        "platform_system": system,
        "platform_machine": machine,
        "extra": "",
    }


ENVIRONMENTS = [environment(*pair) for pair in itertools.product(PYTHONS, PLATFORMS)]


def requirements(project: dict[str, Any]) -> list[Requirement]:
    """The requirements of the package and all its extras, without extras that only name other extras."""
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    own_name = canonicalize_name(project["name"])
    return [r for r in map(Requirement, lines) if canonicalize_name(r.name) != own_name]


def pins(lines: list[str], env: dict[str, str]) -> dict[str, Version]:
    """The version of every package that a constraints file fixes in an environment."""
    found: dict[str, Version] = {}
    for line in lines:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pin = Requirement(text)
        if pin.marker is not None and not pin.marker.evaluate(env):
            continue
        (specifier,) = pin.specifier
        name = canonicalize_name(pin.name)
        assert specifier.operator == "==", f"{text!r} is no pin"
        assert name not in found, f"{name} is pinned twice for {env['python_version']} on {env['sys_platform']}"
        found[name] = Version(specifier.version)
    return found


def unmet(needs: list[Requirement], pinned: dict[str, Version], env: dict[str, str]) -> list[str]:
    """The requirements that no pin meets."""
    return [
        str(need)
        for need in needs
        if (need.marker is None or need.marker.evaluate(env))
        and (
            canonicalize_name(need.name) not in pinned
            or not need.specifier.contains(pinned[canonicalize_name(need.name)], prereleases=True)
        )
    ]


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=lambda e: f"{e['sys_platform']}-{e['python_version']}")
def test_every_direct_dependency_is_pinned_within_its_range(env: dict[str, str]) -> None:
    assert unmet(requirements(PROJECT), pins(CONSTRAINTS, env), env) == []


def test_the_oldest_pins_are_where_the_ranges_of_what_trains_begin() -> None:
    extras = PROJECT["optional-dependencies"]
    needs = map(Requirement, [*PROJECT["dependencies"], *extras["trainer"], *extras["cli"]])
    begin = {need.name: f"{need.specifier}".replace(">=", "==") for need in needs if need.name != PROJECT["name"]}
    oldest = pins(OLDEST_CONSTRAINTS, ENVIRONMENTS[0])
    assert {name: f"=={version}" for name, version in oldest.items()} == begin
    assert {name: f"=={version}" for name, version in OLDEST.items()}.items() <= begin.items()


def test_everything_the_pinned_environment_needs_is_pinned() -> None:
    """Follow the requirements through the installed packages: each name met on the way has its pin."""
    env = {
        **environment(f"{sys.version_info[0]}.{sys.version_info[1]}", "linux"),
        "python_full_version": ".".join(map(str, sys.version_info[:3])),
        "sys_platform": sys.platform,
    }
    pinned = pins(CONSTRAINTS, env)
    needed = [r for r in requirements(PROJECT) if r.marker is None or r.marker.evaluate(env)]
    waiting, seen = [(r.name, r.extras) for r in needed], set()
    while waiting:
        name, extras = waiting.pop()
        key = (canonicalize_name(name), frozenset(extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if key[0] in pinned and Version(Version(installed.version).public) != pinned[key[0]]:
            pytest.skip(f"{name} {installed.version} is not the pinned one: this is another environment")
        for line in installed.requires or ():
            need = Requirement(line)
            asked = [{"extra": extra} for extra in extras] or [{"extra": ""}]
            if need.marker is None or any(need.marker.evaluate(one) for one in asked):
                waiting.append((need.name, need.extras))
    names = {name for name, _ in seen}
    assert "pydantic-core" in names, "the walk did not get far"
    assert names - pinned.keys() == set()


def test_the_oldest_python_named_is_the_oldest_allowed() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert all(python in allowed for python in PYTHONS)
    first = Version(min(PYTHONS, key=Version))
    assert f"{first.major}.{first.minor - 1}" not in allowed


@pytest.mark.parametrize("target", PROJECT["scripts"].values(), ids=PROJECT["scripts"].keys())
def test_console_scripts_can_be_called(target: str) -> None:
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_version_is_one_version() -> None:
    assert hf_lowprec.__version__ == PROJECT["version"] == importlib.metadata.version(PROJECT["name"])
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_nobody_is_told_to_install_from_a_registry_before_there_is_a_release() -> None:
    """`pip install hf-lowprec` finds nothing yet; `'.[recipes]'` works in a clone.

    Messages of the installed package may name its extras: pip knows them from the installed metadata. Drafts for other
    projects are sent after the release.
    """
    docs = {*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs/contributing/upstream").rglob("*.md")}
    texts = [*ROOT.glob("*.md"), *docs, *(ROOT / "examples").rglob("*")]
    command = re.compile(r"""pip install (?:-\S+ )*['"]?hf[-_]lowprec\b""")
    found = [path for path in texts if path.is_file() and command.search(path.read_text(errors="ignore"))]
    assert found == []
    assert command.search("pip install 'hf-lowprec[recipes]'")
    assert command.search("run pip install hf-lowprec")
