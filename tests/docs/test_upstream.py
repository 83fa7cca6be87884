"""The drafts for other projects: the patch applies and works, scripts give the numbers of the pages, tests pass."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from huggingface_hub import ModelCard

import hf_lowprec
from tests.support.docs.pages import DOCS, ROOT, blocks
from tests.support.processes import forkserver
from tests.support.processes.ranks import run_script

DRAFTS = DOCS / "contributing" / "upstream"
PATCH = DRAFTS / "register_optimizer.patch"
HUB = DRAFTS / "hub"
APP = HUB / "space" / "app.py"
RECORD = ROOT / "benchmarks" / "results" / "evidence" / "pretrained-night.json"
WITH_TRACKIO = importlib.util.find_spec("trackio") is not None
MEASURED_WITH = re.search(r"transformers (\S+) ", (DRAFTS / "fp32_modules.md").read_text("utf-8")).group(1)
WITH_PATCH = """
import sys, unittest
folder, block = sys.argv[1:]
sys.path.insert(0, folder + "/src")
exec(block)
from transformers import Trainer
assert sys.modules["transformers"].__file__.startswith(folder)
assert Trainer.get_optimizer_cls_and_kwargs(args)[0] is torch.optim.NAdam
result = unittest.TextTestRunner().run(unittest.defaultTestLoader.discover(folder + "/tests/trainer"))
assert result.wasSuccessful() and result.testsRun == 3
"""
same_version = pytest.mark.skipif(transformers.__version__ != MEASURED_WITH, reason="another version of transformers")


def module(path: Path) -> ModuleType:
    """Import a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # where `inspect` looks
    spec.loader.exec_module(found)
    return found


def table(text: str) -> list[list[str]]:
    """The cells of the rows of a table, without its head."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows[1:] if "---" not in row[0]]


def assert_same_rows(found: list[list[str]], written: list[list[str]], rel: float) -> None:
    """The same, and percentages within a share of themselves and the last digit: they differ between processors."""
    for ours, theirs in zip(found, written, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if one.endswith("%") and other.endswith("%"):
                assert float(one[:-1]) == pytest.approx(float(other[:-1]), rel=rel, abs=0.011), (ours, theirs)
            else:
                assert one == other, (ours, theirs)


@same_version
def test_the_patch_applies_and_registers_a_name(tmp_path: Path) -> None:
    package, patched = tmp_path / "src" / "transformers", ("trainer_optimizer.py", "training_args.py")
    package.mkdir(parents=True)
    for entry in Path(transformers.__file__).parent.iterdir():
        if entry.name in patched:
            shutil.copy(entry, package)
        else:
            (package / entry.name).symlink_to(entry)
    for options in (["--check"], []):
        subprocess.run(["git", "apply", *options, str(PATCH)], cwd=tmp_path, check=True)
    (block,) = (block.text for block in blocks(DRAFTS / "register_optimizer.md"))
    run_script("imported_anew.py", WITH_PATCH, tmp_path, block)


def test_a_test_of_trainer_in_the_style_of_transformers_passes(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()  # by which `TestCasePlus` finds the repository
    (tmp_path / "tests" / "trainer").mkdir(parents=True)
    copy = shutil.copy(DRAFTS / "test_trainer_hf_lowprec.py", tmp_path / "tests" / "trainer")
    suite = unittest.defaultTestLoader.loadTestsFromModule(module(Path(copy)))
    output = io.StringIO()
    result = unittest.TextTestRunner(output).run(suite)
    assert result.wasSuccessful() and result.testsRun == 3 and not result.skipped, output.getvalue()


@same_version
def test_models_in_bf16_are_as_far_from_fp32_as_the_issue_says() -> None:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            module(DRAFTS / "fp32_modules.py").main()
    finally:
        transformers.logging.set_verbosity(level)
    written = table((DRAFTS / "fp32_modules.md").read_text("utf-8"))
    assert len(written) == 6
    assert_same_rows(table(output.getvalue()), written, rel=0.5)


@pytest.mark.distributed
def test_sums_over_a_tensor_parallel_mesh_err_as_the_comment_says() -> None:
    done = forkserver.run(DRAFTS / "pytorch_190626.py", ["2"], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    written = table((DRAFTS / "pytorch_190626.md").read_text("utf-8"))
    assert_same_rows(table(done.stdout), written[:1], rel=0.2)


def bytes_per_parameter(optim: str, options: str) -> list[float]:
    """Of the weight, the gradient, and everything else that an optimizer stores."""
    weight = torch.nn.Parameter(torch.ones(512, 512))
    args = transformers.TrainingArguments(optim=optim, optim_args=options, use_cpu=True)
    if optim in hf_lowprec.OPTIMIZER_NAMES:
        weight.data = weight.data.bfloat16()
    cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer = cls([weight], **kwargs)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = sum(state.nbytes for state in optimizer.state[weight].values() if torch.is_tensor(state) and state.dim())
    return [size / weight.numel() for size in (weight.nbytes, weight.grad.nbytes, states)]


def test_bytes_of_the_page_about_memory_are_those_of_the_optimizers() -> None:
    for name, *sizes in table((DRAFTS / "memory_page.md").read_text("utf-8")):
        optim, _, options = name.replace("`", "").partition(", optim_args=")
        found = bytes_per_parameter(optim.partition(",")[0], options.strip('"'))
        assert [float(size) for size in sizes] == pytest.approx([*found, sum(found)], abs=0.01), name


class TestHub:
    def test_the_cards_have_the_numbers_of_the_record(self) -> None:
        write_cards = module(HUB / "write_cards.py")
        for way, folder in write_cards.FOLDERS.items():
            text = (HUB / folder / "README.md").read_text("utf-8")
            assert text == write_cards.card(way)
            (result,) = ModelCard(text).data.eval_results
            assert f"{result.metric_value:.4f}" in text.partition("\n# ")[2]
            optim, _, size = write_cards.TWINS[way]
            assert sum(bytes_per_parameter(optim, "")) == pytest.approx(size, abs=0.01)

    @pytest.mark.skipif(WITH_TRACKIO, reason="trackio is installed")
    def test_without_trackio_the_app_says_what_it_needs(self) -> None:
        with pytest.raises(SystemExit, match="pip install trackio"):
            runpy.run_path(str(APP), run_name="__main__")

    @pytest.mark.skipif(not WITH_TRACKIO, reason="trackio is not installed")
    def test_with_trackio_the_app_serves_a_page(self, tmp_path: Path) -> None:
        command, env = [sys.executable, "-u", str(APP), str(RECORD)], {**os.environ, "TRACKIO_DIR": str(tmp_path)}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert any("launched at" in line for line in process.stdout)
            finally:
                process.kill()

    def test_the_app_logs_the_losses_of_the_cards(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logged: list[str] = []
        trackio = ModuleType("trackio")
        trackio.init = lambda project, name, **options: logged.append(name)
        trackio.log = lambda values, step: logged.append(f"{values['loss']:.4f}")
        trackio.finish = lambda: None
        monkeypatch.setitem(sys.modules, "trackio", trackio)
        app = module(APP)
        app.log_runs(RECORD)
        for line in table((HUB / "fp32" / "README.md").read_text("utf-8"))[2:]:
            seed = line[0][-1]
            for name, loss in zip(app.RUNS.values(), line[1:], strict=True):
                run = logged.index(f"{name}, seed {seed}")
                assert logged[run + 2] == loss != logged[run + 1]
        with pytest.raises(SystemExit, match="is missing"):
            app.log_runs(APP.with_name("no record"))
