"""What is in the wheel and in the source distribution of a release, and what their metadata say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tools.release_links import IMAGE, LINK, write_links

ROOT = Path(__file__).resolve().parents[1]
URL = "https://example.org/owner/name"
WHEEL_BYTES = 700_000
"""The package has less; benchmarks and tests, were they in it, are more."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions of this checkout, as a release is built."""
    pytest.importorskip("setuptools", minversion="77")
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "build", "dist", "__pycache__"))
    write_links(root, URL, "v0.1.0", f"{URL}/site")
    code = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    (root / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root / "dist"


def metadata(built: Path) -> Message:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        return message_from_string(archive.read(name).decode())


def test_the_notebook_of_a_release_clones_it(built: Path) -> None:
    cells = json.loads((built.parent / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    assert f'REPOSITORY = "{URL}"\n' in [line for cell in cells for line in cell["source"]]


def test_the_wheel_has_every_module_of_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.stat().st_size < WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_lowprec").rglob("*.py")}
    assert files == {*modules, "hf_lowprec/py.typed"}


def test_the_source_distribution_builds_and_explains_itself_without_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    top = {name.partition("/")[0] for name in files}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "hf_lowprec/py.typed"} <= files
    assert not {"tests", "benchmarks", "docs", "examples", "tools"} & top


def test_the_metadata_have_links_and_a_page_that_needs_no_other_file(built: Path) -> None:
    found = metadata(built)
    links = dict(line.split(", ") for line in found.get_all("Project-URL", []))
    assert links["Source"] == URL
    assert links["Changelog"] == f"{URL}/blob/v0.1.0/CHANGELOG.md"
    page = str(found.get_payload())
    assert page.startswith("# hf_lowprec")
    assert LINK.search(page) is None and IMAGE.search(page) is None
    assert re.search(rf'src="{URL}/raw/v0\.1\.0/docs/[^"]+"', page)
    for badge in (f"({URL}/site)", f"({URL}/actions/workflows/ci.yml)", "/github/owner/name/blob/v0.1.0/examples/"):
        assert page.index("[![") < page.index(badge) < page.index("Train Hugging Face models"), badge
    assert found.get_all("License-Expression") == ["Apache-2.0"]


def test_only_torch_is_installed_with_the_package(built: Path) -> None:
    required = [line for line in metadata(built).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [re.split(r"\W", line)[0] for line in required] == ["torch"]
