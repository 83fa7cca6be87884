"""`hf-lowprec run`: unmodified scripts."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from transformers import TrainingArguments
print(__name__, sys.argv, sys.path[0])
import beside
print(repr(TrainingArguments(output_dir="out", optim=sys.argv[-1]).optim.value))
"""


def run(cwd, *words):
    command = [sys.executable, "-m", "hf_lowprec", "run", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120)


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "beside.py").write_text("")
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


def test_a_script_sees_its_own_arguments_and_our_names(script, tmp_path):
    result = run(tmp_path, script, "--flag", "-m", "--help", "--optim", "adamw_bf16_kahan")
    assert result.returncode == 0, result.stderr
    name, names = result.stdout.splitlines()
    assert name == (
        f"__main__ {[str(script), '--flag', '-m', '--help', '--optim', 'adamw_bf16_kahan']} {script.resolve().parent}"
    )
    assert names == "'adamw_bf16_kahan'"


def test_a_module_runs_by_name(script):
    result = run(script.parent, "-m", "script", "adamw_bf16_sr")
    assert result.returncode == 0, result.stderr
    assert "'adamw_bf16_sr'" in result.stdout


def test_a_missing_script_is_named(tmp_path):
    result = run(tmp_path, "absent.py", "--optim", "adamw_bf16_sr")
    assert result.returncode == 2
    assert "absent.py" in result.stderr


def test_the_scripts_own_failure_comes_through(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    assert run(tmp_path, "fails.py").returncode == 7
    (tmp_path / "raises.py").write_text("raise KeyError('the reason')")
    result = run(tmp_path, "raises.py")
    assert result.returncode == 1
    assert "KeyError: 'the reason'" in result.stderr
