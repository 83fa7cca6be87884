"""FSDP2 resumes a checkpoint of another rounding mode, sharded or full, as if the mode had changed within the run.

Saved in another `state_dtype`, the states are those that one process gets from the full checkpoint.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch

import hf_lowprec
from hf_lowprec.integrations.transformers.optim_args import optim_args_of
from tests.scripts import trainer_ranks
from tests.support.processes import shards
from tests.support.processes.ranks import Run, run_trainer

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def run(optim: str, folder, *words: str, **options) -> Run:
    """Two ranks under FSDP2."""
    return run_trainer(2, "fsdp2", folder, " ".join(["--max_steps 6 --save_steps 3 --optim", optim, *words]), **options)


def digest(*arguments, **options) -> str | None:
    """A digest of all weights and states at the end."""
    return run(*arguments, **options).digest


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        ("sr", "kahan", FULL),
        pytest.param("kahan", "sr", FULL, marks=pytest.mark.every_case),
        pytest.param("sr", "kahan", SHARDED, marks=pytest.mark.every_case),
        pytest.param("kahan", "sr", SHARDED, marks=pytest.mark.every_case),
    ],
)
def test_the_mode_changes_by_the_option_alone(tmp_path, first, then, kind):
    modes = {"sr": "stochastic", "kahan": "kahan"}
    schedule = ["--optim_args", f"rounding={modes[first]}:0.5|{modes[then]}"]
    resume = ["--resume_from_checkpoint", str(tmp_path / "checkpoint-3")]
    within = digest(f"adamw_bf16_{first}", tmp_path, *schedule, STATE_DICT_TYPE=kind)
    assert digest(f"adamw_bf16_{then}", tmp_path / "resumed", *resume, STATE_DICT_TYPE=kind) == within
    if kind == SHARDED:
        assert digest(f"adamw_bf16_{first}", tmp_path / "scheduled", *resume, *schedule, STATE_DICT_TYPE=kind) == within


@pytest.mark.parametrize(
    ("saver", "loader", "kind"),
    [
        ("adamw_torch", "adamw_bf16_kahan", SHARDED),
        pytest.param("adamw_bf16_kahan", "adamw_torch", FULL, marks=pytest.mark.every_case),
        pytest.param("adamw_torch", "adamw_bf16_kahan", FULL, marks=pytest.mark.every_case),
        pytest.param("adamw_bf16_kahan", "adamw_torch", SHARDED, marks=pytest.mark.every_case),
    ],
)
def test_checkpoints_of_other_optimizers_are_refused_with_the_way_out(tmp_path, saver, loader, kind):
    run(saver, tmp_path, "--max_steps", "3", STATE_DICT_TYPE=kind)
    resume = ["--resume_from_checkpoint", str(tmp_path / "checkpoint-3")]
    said = run(loader, tmp_path / "resumed", *resume, STATE_DICT_TYPE=kind, fails=True).report
    assert "without resume_from_checkpoint" in said, said[-3000:]


def digest_of_one_process(checkpoint, optim: str, optim_args: str) -> str:
    """The digest of the full `checkpoint`, loaded without FSDP into an optimizer with these options."""
    model = trainer_ranks.llama(hidden_size=64)
    hf_lowprec.cast_model(model)
    model.load_state_dict(torch.load(checkpoint / "pytorch_model_fsdp.bin", weights_only=True))
    saved = torch.load(checkpoint / "optimizer.bin", weights_only=True)
    params = dict(model.named_parameters())
    groups = [{"params": [params[name] for name in group["params"]]} for group in saved["param_groups"]]
    options = optim_args_of(SimpleNamespace(optim=optim, optim_args=optim_args)).optimizer
    optimizer = hf_lowprec.AdamW(groups, lr=1e-2, **{"rounding": "stochastic", **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(saved)
    return shards.digest(model.parameters(), optimizer)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("bf16", "int8", marks=pytest.mark.every_case),
        pytest.param("int8", "fp32", marks=pytest.mark.every_case),
        pytest.param("exp_avg:int8|exp_avg_sq:fp32", "exp_avg_sq:int8", marks=pytest.mark.every_case),
    ],
)
def test_the_dtype_of_states_changes_by_the_option_alone(tmp_path, first, then):
    optim, digests = "adamw_bf16_sr", set()
    for kind in (SHARDED, FULL):
        folder, options = tmp_path / kind, {"STATE_DICT_TYPE": kind, "HIDDEN_SIZE": "64"}
        saved = digest(optim, folder, "--optim_args", f"state_dtype={first}", "--max_steps", "3", **options)
        resume = ["--resume_from_checkpoint", str(folder / "checkpoint-3"), "--max_steps", "3"]
        digests.add(digest(optim, tmp_path / "resumed", *resume, "--optim_args", f"state_dtype={then}", **options))
        if kind == SHARDED:  # without the option, nothing is converted
            assert digest(optim, tmp_path / "resumed", *resume, **options) == saved
    assert digests == {digest_of_one_process(tmp_path / FULL / "checkpoint-3", optim, f"state_dtype={then}")}
    assert saved not in digests
