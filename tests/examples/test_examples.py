"""The examples run as a reader would run them, and learn."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from hf_lowprec.monitor.rules import FAULTS
from tests.support.processes import forkserver
from tests.support.processes.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *words: object) -> str:
    result = forkserver.run(EXAMPLES / script, [str(word) for word in words], timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


# Losses in nats: of 512 tokens a uniform guess costs 6.24, of two classes 0.69.
RECIPES = {
    "full_finetuning": 5.0,
    "lora_sft": 6.15,  # the frozen weights are random
    "dpo": 0.3,
    "classification": 0.4,
    "seq2seq": 5.9,
    "vision": 0.4,
    "continued_pretraining": 5.0,
}


NIGHTLY = [pytest.param(name, marks=pytest.mark.every_case) for name in RECIPES if name != "full_finetuning"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["full_finetuning", *NIGHTLY])
def test_a_recipe_learns(tmp_path, recipe):
    if recipe in ("lora_sft", "dpo"):
        pytest.importorskip("trl")
        pytest.importorskip("peft")
    words = ("--smoke", "--output_dir", tmp_path, "--disable_tqdm", "True", "--logging_steps", 5)
    out = run(f"{recipe}.py", *words)
    assert "lost_updates" in out and [fault.what for fault in FAULTS.values() if fault.what in out] == []
    before, after = map(float, re.search(r"validation loss ([\d.]+) -> ([\d.]+)", out).groups())
    assert after < RECIPES[recipe] < before
    mode = "stochastic" if recipe == "continued_pretraining" else "split"
    assert out.count(f"rounding        weights {mode}") == 1
    saved = load_file(next(tmp_path.glob("*.safetensors")))
    assert {tensor.dtype for tensor in saved.values()} >= {torch.bfloat16}


LAUNCHES = [pytest.param(*case, marks=pytest.mark.every_case) for case in (("ddp", 2, "DDP"), ("hsdp", 4, "HSDP"))]
LAUNCHES.append(("fsdp2", 2, "FSDP2"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "ranks", "kind"), LAUNCHES)
def test_launch_configurations(tmp_path, name, ranks, kind):
    """In the environment that `accelerate launch` makes, with fewer processes, and autocast left on by habit."""
    words = f"--config_file {EXAMPLES}/configs/{name}.yaml --num_machines 1 --num_processes {ranks}"
    if name == "hsdp":
        words += " --parallelism_config_dp_shard_size 2 --main_process_ip 127.0.0.1"
    words += f" --main_process_port 0 --mixed_precision bf16 {EXAMPLES}/continued_pretraining.py --smoke --use_cpu"
    words += f" --output_dir {tmp_path} --max_steps 4 --logging_steps 2 --disable_tqdm True --save_strategy no"
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words.split()))
    script = [args.training_script, *args.training_script_args]
    out = run_ranks("example_on_cpu.py", ranks, *script, **prepare_multi_gpu_env(args))
    assert f"{kind}: FP32 sums over {ranks} ranks, 16-bit gradients on the wire" in out
    assert out.count("mixed precision: 'bf16'") == 1
    assert "bfloat16" in out
    assert out.count("validation loss") == 1
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--kind", "unet"), ("--lora",)])
def test_diffusion_learns(tmp_path, options):
    pytest.importorskip("diffusers")
    out = run("diffusion.py", "--output", tmp_path, *options)
    before, after = map(float, re.search(r"validation loss ([\d.]+) -> ([\d.]+)", out).groups())
    # Predicting no noise costs 1; adapters of random weights learn little more than that.
    assert after < (0.5 if "unet" in options else 1.05) and before > 1.2
    saved = load_file(next(tmp_path.glob("*.safetensors")))
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.every_case
@pytest.mark.slow
def test_the_accelerate_loop_saves_what_it_knows(tmp_path):
    out = run("accelerate_loop.py", "--smoke", "--rounding", "stochastic", "--output", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < 5
    full, stored = (load_file(tmp_path / folder / "model.safetensors") for folder in ("fp32", "bf16"))
    assert {tensor.dtype for tensor in full.values()} == {torch.float32}
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert torch.equal(full[name], tensor.float()), "without a compensation both are the same numbers"


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.distributed
def test_the_accelerate_loop_saves_a_sharded_model(tmp_path):
    """With the settings of the configuration, which `accelerate launch` hands over as these variables."""
    settings = yaml.safe_load((EXAMPLES / "configs" / "fsdp2.yaml").read_text())["fsdp_config"]
    variables = {name.upper(): str(value) for name, value in settings.items()} | {"ACCELERATE_USE_FSDP": "true"}
    run_ranks("example_on_cpu.py", 2, EXAMPLES / "accelerate_loop.py", "--smoke", "--output", tmp_path, **variables)
    full, stored = (load_file(tmp_path / folder / "model.safetensors") for folder in ("fp32", "bf16"))
    assert {tensor.dtype for tensor in full.values()} == {torch.float32}
    assert all(torch.equal(full[name].to(tensor.dtype), tensor) for name, tensor in stored.items())
    assert any(not torch.equal(full[name], tensor.float()) for name, tensor in stored.items())
    assert (tmp_path / "fp32/tokenizer.json").exists()


def test_every_example_is_run_here():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {"smoke", "demo"}  # test_demo.py runs that one
    assert scripts == {*RECIPES, "accelerate_loop", "diffusion"}
