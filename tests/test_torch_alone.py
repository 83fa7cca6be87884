"""The package where nothing but torch is installed: `import hf_lowprec`, the core, and what the rest says it needs."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import hf_lowprec
from tests.support.chosen_cases import one_in_turn
from tests.support.processes.ranks import run_script

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "scripts" / "torch_alone.py"
WITHOUT_TORCH = """
import sys
before = set(sys.modules)
import hf_lowprec
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(new - set(sys.stdlib_module_names) - {"hf_lowprec"})
"""
STEP_ALONE = """
import sys, torch, hf_lowprec
hf_lowprec.AdamW
print({"triton", "transformers", "accelerate", "torch._dynamo", "torch.distributed.tensor"} & sys.modules.keys())
weight = torch.ones(4, 4, requires_grad=True)
optimizer = hf_lowprec.AdamW([weight])
weight.sum().backward()
optimizer.clip_grad_norm_(1.0)
optimizer.step()
optimizer.zero_grad()
print({"transformers", "accelerate", "torch._dynamo", "torch.distributed.tensor"} & sys.modules.keys())
"""


def run(*words: str) -> str:
    """The output of a new interpreter."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_importing_the_package_imports_the_standard_library_alone():
    assert run("-c", WITHOUT_TORCH) == "set()\n"


def test_optimizers_import_nothing_that_takes_longer_than_themselves_nor_does_a_step():
    """Torch's own optimizers import its compiler, which takes as long as torch."""
    assert run("-c", STEP_ALONE) == "set()\nset()\n"


def test_casting_every_optimizer_and_fp32_sums_need_torch_alone():
    modes = itertools.groupby(hf_lowprec.OPTIMIZER_NAMES, lambda name: name.partition("_")[0])
    names = [name for turn, (_, of_one) in enumerate(modes) for name in one_in_turn([*of_one], turn)]
    assert run(str(SCRIPT), *names).endswith("done\n")


NEEDS = {
    "typer": ([], "hf-lowprec: the command line needs typer: pip install typer rich packaging safetensors\n"),
    "transformers": (
        ["doctor"],
        "Error: doctor needs transformers: pip install 'transformers>=5.5.4' 'accelerate>=1.11'\n",
    ),
    "matplotlib": (["plot", "run"], "Error: plot needs matplotlib: pip install matplotlib\n"),
}


@pytest.mark.parametrize("missing", NEEDS)
def test_a_command_says_what_it_needs(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from hf_lowprec.__main__ import main; main()"
    words, said = NEEDS[missing]
    assert run_script("imported_anew.py", code, *words, fails=True) == said


EXPLORED = """
import inspect, pydoc, sys
sys.modules |= dict.fromkeys({missing!r})
import hf_lowprec
listed, members = dir(hf_lowprec), dict(inspect.getmembers(hf_lowprec))
pydoc.render_doc(hf_lowprec)
public = {{name for name in listed if name[0] != "_"}}
print(len(listed) == len(members), *sorted(public ^ set(hf_lowprec.__all__)))
"""
NEED_ACCELERATE = "LowPrecisionCallback export_checkpoint initialize_deepspeed prepare_accelerator save_pretrained"


@pytest.mark.parametrize(
    ("missing", "hidden"),
    [(["deepspeed"], "initialize_deepspeed"), (["deepspeed", "transformers", "accelerate"], NEED_ACCELERATE)],
    ids=str,
)
def test_help_and_completion_do_without_what_is_missing(missing, hidden):
    assert run_script("imported_anew.py", EXPLORED.format(missing=missing)) == f"True {hidden}\n"
