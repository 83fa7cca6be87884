"""The package where nothing but torch is installed: `import hf_lowprec`, the core, and what the rest says it needs."""

import subprocess
import sys
from pathlib import Path

import hf_lowprec

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "scripts" / "torch_alone.py"
WITHOUT_TORCH = """
import sys
before = set(sys.modules)
import hf_lowprec
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(new - set(sys.stdlib_module_names) - {"hf_lowprec"})
"""


def run(*words: str) -> str:
    """The output of a new interpreter."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_importing_the_package_imports_the_standard_library_alone():
    assert run("-c", WITHOUT_TORCH) == "set()\n"


def test_casting_every_optimizer_and_fp32_sums_need_torch_alone():
    assert run(str(SCRIPT), *hf_lowprec.OPTIMIZER_NAMES).endswith("done\n")


def test_the_command_line_says_what_it_needs():
    code = "import sys; sys.modules['typer'] = None; from hf_lowprec.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "hf-lowprec: the command line needs typer; pip install 'hf-lowprec[cli]'\n"


def test_a_command_says_what_it_needs():
    code = "import sys; sys.modules['transformers'] = None; from hf_lowprec.__main__ import main; main()"
    command = [sys.executable, "-c", code, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "Error: doctor needs transformers: pip install 'hf-lowprec[trainer]'\n"
