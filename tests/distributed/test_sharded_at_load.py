"""Models that transformers shards over a device mesh while loading them: TP, FSDP2, EP and their products."""

import pytest
import torch
from safetensors.torch import load_file

from hf_lowprec.integrations.export.checkpoint_export import export_checkpoint
from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SETUPS = {
    "TP": (2, "llama", "tp_size=2"),
    "FSDP2 x TP": (4, "llama", "fsdp_size=2,tp_size=2"),
    "HSDP": (4, "llama", "dp_replicate_size=2,fsdp_size=2"),
    "FSDP2 x EP": (2, "moe", "fsdp_size=2,ep_size=2"),
    "EP x TP": (2, "moe", "tp_size=2,ep_size=2"),
    "FSDP2 x TP of experts": (4, "moe", "fsdp_size=2,tp_size=2"),
    "FSDP2 of experts": (4, "moe", "fsdp_size=4,ep_size=2"),
    "FSDP2 x TP x EP": (4, "moe", "fsdp_size=2,tp_size=2,ep_size=2"),
    "FSDP2 of an encoder": (2, "encoder", "fsdp_size=2"),
    "8 ranks": (8, "moe", "fsdp_size=4,tp_size=2,ep_size=2"),
}
OF_SUMS = {
    "FSDP2, experts in groups": (8, "moe", "fsdp_size=8,ep_size=2"),
    "TP": (8, "moe", "tp_size=8"),
}


def setups(*chosen: str) -> pytest.MarkDecorator:
    """All setups, of which the short suite runs the `chosen` ones."""
    marked = [pytest.param(name, marks=() if name in chosen else pytest.mark.every_case) for name in SETUPS]
    return pytest.mark.parametrize("setup", marked)


def run(setup: str, action: str, options: str, folder) -> None:
    ranks, kind, sizes = (OF_SUMS if action == "sums" else SETUPS)[setup]
    assert "agrees" in run_ranks("sharded_at_load.py", ranks, action, kind, sizes, options, str(folder))


MORE = "adamw_bf16_split:int8,adamw_bf16_sr,adamw_bf16_split,adamw_bf16_kahan,muon_bf16_split,adafactor_bf16_split"


@setups("FSDP2 x TP x EP")
@pytest.mark.parametrize("modes", ["adamw_bf16_sr:int8", pytest.param(MORE, marks=pytest.mark.every_case)])
def test_steps_are_those_of_the_whole_model(tmp_path, setup, modes):
    """Given the same gradients, bit for bit: weights, states and FP32 estimates; what starts with low bits, too."""
    run(setup, "steps", modes, tmp_path)


@setups("EP x TP")
@pytest.mark.parametrize("accumulation", ["nearest", pytest.param("fp32", marks=pytest.mark.every_case)])
def test_gradients_of_micro_batches_are_those_of_the_whole_model(tmp_path, setup, accumulation):
    run(setup, "gradients", accumulation, tmp_path)


@pytest.mark.every_case
@pytest.mark.parametrize("setup", OF_SUMS)
def test_sums_over_8_ranks_are_rounded_once(tmp_path, setup):
    """Against exact means in FP64."""
    run(setup, "sums", "any", tmp_path)


@pytest.mark.parametrize("setup", ["FSDP2 x TP", pytest.param("FSDP2 of experts", marks=pytest.mark.every_case)])
def test_all_ranks_skip_a_step_with_nan_on_one(tmp_path, setup):
    run(setup, "nonfinite", "any", tmp_path)


def test_ranks_that_differ_tell(tmp_path):
    run("TP", "differences", "any", tmp_path)


@setups("FSDP2 x EP")
@pytest.mark.parametrize("optim", ["adamw_bf16_split", pytest.param("adamw_bf16_sr", marks=pytest.mark.every_case)])
def test_trainer_clips_saves_resumes_and_exports(tmp_path, setup, optim):
    """Bit for bit; a checkpoint of four ranks also goes to another mesh."""
    run(setup, "trainer", optim, tmp_path)
    export_checkpoint(tmp_path / optim / "checkpoint-4", tmp_path / "from files")
    live = load_file(tmp_path / optim / "exported" / "model.safetensors")
    from_files = load_file(tmp_path / "from files" / "model.safetensors")
    assert live.keys() == from_files.keys()
    assert all(torch.equal(tensor, from_files[name]) for name, tensor in live.items())
