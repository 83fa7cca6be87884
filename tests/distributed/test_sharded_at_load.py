"""Models that transformers shards over a device mesh while loading them: TP, FSDP2, EP and their products."""

import pytest
import torch
from safetensors.torch import load_file

from hf_lowprec.tools.export.checkpoint_export import export_checkpoint
from tests.support.processes.ranks import run_ranks


pytestmark = pytest.mark.distributed

SETUPS = [
    (2, "llama", "tp_size=2"),
    (4, "llama", "fsdp_size=2,tp_size=2"),
    (2, "moe", "fsdp_size=2,ep_size=2"),
    (2, "moe", "tp_size=2,ep_size=2"),
    (4, "moe", "fsdp_size=4,ep_size=2"),
    (8, "moe", "fsdp_size=4,tp_size=2,ep_size=2"),
]
OPTIMS = "adamw_bf16_split,adamw_bf16_kahan,adamw_bf16_sr,adamw_bf16_split:int8,muon_bf16_split"


@pytest.mark.parametrize(("ranks", "kind", "sizes"), SETUPS)
def test_steps_are_those_of_the_whole_model(tmp_path, ranks, kind, sizes):
    assert "agrees" in run_ranks("sharded_at_load.py", ranks, "steps", kind, sizes, OPTIMS, str(tmp_path))


@pytest.mark.parametrize(("ranks", "kind", "sizes"), SETUPS)
def test_trainer_trains_saves_resumes_and_exports(tmp_path, ranks, kind, sizes):
    run_ranks("sharded_at_load.py", ranks, "trainer", kind, sizes, "adamw_bf16_split", str(tmp_path))
    out = tmp_path / "adamw_bf16_split"
    export_checkpoint(out / "checkpoint-4", out / "from files")
    live, from_files = (load_file(out / name / "model.safetensors") for name in ("exported", "from files"))
    assert live.keys() == from_files.keys()
    assert all(torch.equal(tensor, from_files[name]) for name, tensor in live.items())
