"""`hf-lowprec run` runs unmodified scripts, and names the command for launchers."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_lowprec.tools.cli.run import launcher_command
from tests.support.command_output import hf_lowprec, refused
from tests.support.processes import forkserver
from tests.support.training.counting_text import sentences, tokenizer
from tests.support.training.tiny_trainer import llama

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
MAIN = SCRIPTS.parents[1] / "hf_lowprec" / "__main__.py"

SCRIPT = """
import sys
from transformers import TrainingArguments
print(__name__, sys.argv, sys.path[0])
import neighbour
print(repr(TrainingArguments(output_dir="out", optim=sys.argv[-1]).optim.value))
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "neighbour.py").write_text("")
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


def test_a_script_sees_its_own_arguments_and_our_names(script):
    words = [script, "--flag", "-m", "--help", "--optim", "adamw_bf16_kahan"]
    result = forkserver.run(MAIN, ["run", *map(str, words)], timeout=120)
    assert result.returncode == 0, result.stderr
    name, names = result.stdout.splitlines()
    assert name == (
        f"__main__ {[str(script), '--flag', '-m', '--help', '--optim', 'adamw_bf16_kahan']} {script.resolve().parent}"
    )
    assert names == "'adamw_bf16_kahan'"


def test_a_module_runs_by_name(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    result = forkserver.run(MAIN, ["run", "-m", "script", "adamw_bf16_sr"], timeout=120)
    assert result.returncode == 0, result.stderr
    assert "'adamw_bf16_sr'" in result.stdout


def test_the_scripts_own_failure_comes_through(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    (tmp_path / "raises.py").write_text("raise KeyError('the reason')")
    fails, raises = (
        forkserver.run(MAIN, ["run", str(tmp_path / name)], timeout=120) for name in ("fails.py", "raises.py")
    )
    assert fails.returncode == 7
    assert raises.returncode == 1
    assert "KeyError: 'the reason'" in raises.stderr


def test_a_missing_script_is_named():
    assert "absent.py" in refused("run", "absent.py", "--optim", "adamw_bf16_sr")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nope", "No module named nope"),
        ("package", "'package' is a package and cannot be directly executed"),
        ("", "Error while finding module specification"),
    ],
)
def test_a_module_that_cannot_be_run_is_named(name, reason, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    said = refused("run", "-m", name)
    assert "Invalid value for -m: " in said
    assert reason in said


@pytest.mark.parametrize("text", ["import nope_deeper", "import runpy; runpy.run_module('nope_deeper')"])
def test_what_a_module_imports_in_vain_is_its_own_failure(text, tmp_path, monkeypatch):
    (tmp_path / "imports_in_vain.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportError, match="nope_deeper"):
        hf_lowprec("run", "-m", "imports_in_vain")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            "torchrun --nproc-per-node 8 train.py --optim adamw_bf16_split --name a;b",
            "torchrun --nproc-per-node 8 -m hf_lowprec run train.py --optim adamw_bf16_split --name 'a;b'",
        ),
        ("torchrun -m pack.train -m 3", "torchrun -m hf_lowprec run -m pack.train -m 3"),
        ("torchrun --no-python train", "torchrun -m hf_lowprec run script.py …"),
        ("-m torch.distributed.run t.py 1", "python -m torch.distributed.run -m hf_lowprec run t.py 1"),
        ("/usr/bin/deepspeed --num_gpus 2 t.py 1", "torchrun --nproc-per-node gpu -m hf_lowprec run t.py 1"),
        (
            "/some/bin/accelerate launch --config_file fsdp.yaml --module pack.train --seed 1",
            "/some/bin/accelerate launch --config_file fsdp.yaml -m hf_lowprec run --module pack.train --seed 1",
        ),
        ("accelerate-launch t.py", "accelerate-launch -m hf_lowprec run t.py"),
        ("-m accelerate.commands.launch t.py", "python -m accelerate.commands.launch -m hf_lowprec run t.py"),
        (
            "-m accelerate.commands.accelerate_cli launch",
            "python -m accelerate.commands.accelerate_cli launch -m hf_lowprec run script.py …",
        ),
        (
            "/some/bin/trl dpo --output_dir o --eos_token <|end|>",
            "accelerate launch -m hf_lowprec run -m trl.scripts.dpo --output_dir o --eos_token '<|end|>'",
        ),
        (
            "llamafactory-cli train sft.yaml learning_rate=1e-5",
            "torchrun --nproc-per-node gpu -m hf_lowprec run -m llamafactory.launcher sft.yaml learning_rate=1e-5",
        ),
        ("-m trl.cli.main sft", "accelerate launch -m hf_lowprec run -m trl.scripts.sft"),
    ],
)
def test_a_launcher_is_told_to_start_us_and_not_the_other_way_round(words, command):
    said = refused("run", *words.split())
    assert said.endswith(command)
    assert f"{words.removeprefix('-m ').split()[0]} starts training in new processes, where the optimizer" in said


@pytest.mark.parametrize("words", ["trl env", "trl", "accelerate config", "trl.py sft", "train.py torchrun"])
def test_what_launches_nothing_is_run(words):
    script, *arguments = words.split()
    assert launcher_command(script, arguments, module=False) is None
    assert launcher_command("torchrun", [], module=False) is not None


def launched(command: list[str], **environment: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1]), **environment}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.every_case
@pytest.mark.slow
def test_the_command_that_is_given_for_trl_trains(tmp_path):
    """With the processes that accelerate and TRL start by themselves; nothing is patched."""
    model, data = tmp_path / "model", tmp_path / "data"
    tiny = llama()
    tiny.config.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64})
    tiny.save_pretrained(model)
    tokenizer().save_pretrained(model)
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(16)))
    settings = {"model_name_or_path": model, "dataset_name": data, "output_dir": tmp_path / "out", "max_steps": 1}
    settings |= {"report_to": "none", "optim": "adamw_bf16_kahan", "use_cpu": True, "save_strategy": "no"}
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    result = hf_lowprec("run", "trl", "sft", *words)
    program, command, *rest = shlex.split(result.output.splitlines()[-2])
    assert (program, command) == ("accelerate", "launch")
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "1", *rest]
    output = launched(launch, HF_HOME=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    assert "bfloat16 training of LlamaForCausalLM" in output
    assert "weights kahan" in output


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.distributed
def test_the_command_that_is_given_for_torchrun_trains(tmp_path):
    """In a new interpreter, where nothing has registered the names before."""
    words = f"--output_dir {tmp_path} --optim adamw_bf16_sr --max_steps 2 --save_strategy no --use_cpu --report_to none"
    script = ["--nproc-per-node", "1", str(SCRIPTS / "distributed_train_tiny.py"), *words.split()]
    result = hf_lowprec("run", "torchrun", *script)
    program, *rest = shlex.split(result.output.splitlines()[-2])
    output = launched([str(Path(sys.executable).parent / program), *rest])
    assert output.count("steps=2 dtype=torch.bfloat16") == 1
