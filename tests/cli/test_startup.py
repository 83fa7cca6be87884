"""Help, the version and wrong arguments of the command line import neither torch nor transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import hf_lowprec
from hf_lowprec.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [str(command.name) for command in app.registered_commands]

# Python runs `sitecustomize` before anything else.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "accelerate", "triton", "numpy", "safetensors", "matplotlib"):
            raise RuntimeError(f"{name} is imported")

sys.meta_path.insert(0, Blocker())
"""

CONSOLE_SCRIPT = """
import json, sys
from hf_lowprec.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["hf-lowprec", *words]
    try:
        main()
    except SystemExit as ending:
        print("ended with", ending.code or 0, flush=True)
"""


def start(folder: Path, *words: str, fails: bool = False) -> str:
    """The output of a new interpreter in which `folder` is the first to be searched for modules."""
    result = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def without_torch(tmp_path: Path) -> Path:
    """A folder from which programs start that cannot import torch."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    assert "torch is imported" in start(tmp_path, "-c", "import torch", fails=True)
    return tmp_path


def test_help_version_and_wrong_arguments_need_no_torch(without_torch: Path) -> None:
    good = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    wrong = [["nope"], ["--nope"], ["doctor", "--nope"], ["doctor", "model", "superfluous"]]
    wrong += [["estimate"], ["estimate", "model", "--gpus", "many"], ["export", "checkpoint"], ["run"]]
    wrong += [["run", "absent.py"], ["run", "torchrun", "train.py"]]
    out = start(without_torch, "-c", CONSOLE_SCRIPT, json.dumps([*good, *wrong]))
    assert out.count("ended with 0") == len(good), out
    assert out.count("ended with 2") == len(wrong), out
    assert f"hf-lowprec {hf_lowprec.__version__}" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_in_full_on_80_columns(command: str) -> None:
    """Long metavars take the place of the names, which are then cut."""
    out = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    names = {name for param in get_command(app).commands[command].params for name in param.opts if name[0] == "-"}  # type: ignore[attr-defined]
    assert {name for name in names if f" {name} " not in out} == set()
    assert "<bool>" not in out + CliRunner().invoke(app, ["--help"]).output  # no flag looks as if it took a value


def test_python_m_is_the_same_command(without_torch: Path) -> None:
    assert start(without_torch, "-m", "hf_lowprec", "--version") == f"hf-lowprec {hf_lowprec.__version__}\n"
    assert "--gpu-memory" in start(without_torch, "-m", "hf_lowprec", "estimate", "--help")


WORKER = """
import pickle, sys
from multiprocessing import get_context
from transformers import TrainingArguments

def name(pickled):
    assert "hf_lowprec" not in sys.modules
    return str(pickle.loads(pickled).optim.value) + " " + TrainingArguments("out", optim="lion_bf16_sr").optim.value

if __name__ == "__main__":
    pickled = pickle.dumps(TrainingArguments("out", optim="adamw_bf16_kahan"))
    with get_context("spawn").Pool(1) as pool:
        print(pool.apply(name, (pickled,)))
"""


@pytest.mark.every_case
@pytest.mark.slow
def test_a_script_and_the_processes_that_it_spawns_have_the_names(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WORKER)
    code = "import sys; from hf_lowprec.__main__ import main; sys.argv[1:] = ['run', 'script.py']; main()"
    (tmp_path / "hf-lowprec").write_text(f"if __name__ == '__main__':\n    {code}")
    assert start(tmp_path, "hf-lowprec").splitlines()[-1] == "adamw_bf16_kahan lion_bf16_sr"
