"""The examples run as a reader would run them, and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *words: object) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_trainer_example(tmp_path):
    words = ["--max_steps", 40, "--logging_steps", 20, "--use_cpu", "--disable_tqdm", "True", "--save_strategy", "no"]
    out = run("trainer.py", "--output_dir", tmp_path, *words)
    # A uniform guess over 256 bytes costs ln 256 = 5.55; knowing how often each occurs in Python is worth 2 nats.
    assert float(re.search(r"validation loss ([\d.]+)", out)[1]) < 4
    assert "weights stored as torch.bfloat16" in out
    assert "rounding     weights kahan" in out


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "ranks", "kind"), [("ddp", 2, "DDP"), ("fsdp2", 2, "FSDP2"), ("hsdp", 4, "HSDP")])
def test_launch_configurations(tmp_path, name, ranks, kind):
    """As the reader would, but for a CPU, fewer processes, and `--mixed_precision bf16` left on by habit."""
    words = (
        f"--config_file {EXAMPLES}/configs/{name}.yaml --num_machines 1 --num_processes {ranks} --mixed_precision bf16"
    )
    if name == "hsdp":
        words += " --parallelism_config_dp_shard_size 2 --main_process_ip 127.0.0.1"
    training = "--max_steps 4 --logging_steps 2 --use_cpu --disable_tqdm True --save_strategy no"
    root = EXAMPLES.parent
    script = f"{root}/tests/scripts/example_on_cpu.py {EXAMPLES}/trainer.py --output_dir {tmp_path} {training}"
    command = [sys.executable, "-m", "accelerate.commands.launch", *words.split(), "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    result = subprocess.run(
        [*command, *script.split()], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{kind}: FP32 sums over {ranks} ranks, 16-bit gradients on the wire" in result.stdout
    assert result.stdout.count("'bf16' was asked for and is off") == 1
    assert "bfloat16" in result.stdout
    assert result.stdout.count("validation loss") == 1


@pytest.mark.slow
def test_plain_loop_example(tmp_path):
    out = run("plain_loop.py", "--steps", 40, "--rounding", "stochastic", "--output", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < 4
    full, stored = load_file(tmp_path / "fp32.safetensors"), load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in full.values()} == {torch.float32}
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert torch.equal(full[name], tensor.float()), "without a compensation both are the same numbers"
