"""The private names that the `private_apis.py` of both libraries rely on; each failure says what went away."""

import dataclasses
from pathlib import Path

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    Trainer,
    TrainerState,
    TrainingArguments,
)

from hf_lowprec.integrations.accelerate import private_apis as accelerate_apis
from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.checkpoints.resume import read_trainer_state
from hf_lowprec.integrations.transformers.optim_names import add_optimizer_names
from hf_lowprec.oldest_versions import OLDEST
from tests.support.processes.ranks import run_script
from tests.support.training.tiny_trainer import trained

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_tiny.py"
WHERE = f"in transformers {transformers.__version__}; adapt hf_lowprec/integrations/transformers/private_apis.py"


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("adamw_bf16_slit", r"\. Did you mean 'adamw_bf16_split'\?"),
        ("AdamW_bf16_kahan", r"\. Did you mean 'adamw_bf16_kahan'\?"),
        ("adamw_bf16", r"\. Did you mean 'adamw_bf16_split'\?"),
        ("muon", r"\. Did you mean 'muon_bf16_split'\?"),
        ("lion-bf16-stochastic", r"\. Did you mean 'lion_bf16_sr'\?"),
        ("adamw_trch", r"\. Did you mean 'adamw_torch'\?"),
        ("x", ""),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_one(name, end):
    add_optimizer_names()  # once more, which changes nothing
    with pytest.raises(ValueError, match=rf"^{name} is not a valid OptimizerNames, please .*\]{end}$"):
        TrainingArguments(optim=name)


def test_what_comes_after_the_state_of_a_checkpoint(tmp_path, monkeypatch):
    """Where our manifest is written, no checkpoint has been pushed or deleted."""
    events = []

    class Watched(Trainer):
        def _save_checkpoint(self, model, trial):
            with private_apis.calling_after_trainer_state(lambda: events.append("written")):
                super()._save_checkpoint(model, trial)

        def _push_from_checkpoint(self, checkpoint_folder):
            events.append("push")

    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", lambda *args, **kwargs: events.append("rotate"))
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(Trainer, "_finish_current_push", lambda self: None)
    trained(tmp_path, trainer_cls=Watched, max_steps=1, save_strategy="steps", save_steps=1, push_to_hub=True)
    assert events == ["written", "push", "rotate"], f"Trainer writes its state later than it was {WHERE}"


@dataclasses.dataclass
class WiderState(TrainerState):
    """A state with a field more, as a subclass of Trainer may have."""

    tokens: int = 0


def test_a_subclass_of_the_trainers_state_is_read_as_such(tmp_path):
    WiderState(global_step=3, train_batch_size=8, tokens=7).save_to_json(str(tmp_path / "trainer_state.json"))
    with private_apis.trainer_states_read_by(read_trainer_state):
        wide = WiderState.load_from_json(str(tmp_path / "trainer_state.json"))
        plain = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert wide == WiderState(global_step=3, train_batch_size=8, tokens=7)
    assert plain == TrainerState(global_step=3, train_batch_size=8)  # without the field that it does not have


@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.14"), reason="only newer ones mark models")
def test_a_model_prepared_for_evaluation_is_prepared_again_for_training():
    """DDP would not wrap it: `tests/distributed` shows it with ranks."""
    model = torch.nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True)
    with accelerate_apis.without_prepared_mark(model):
        accelerator.prepare_model(model, evaluation_mode=True)
        assert getattr(model, accelerate_apis._PREPARED, False), f"accelerate marks models otherwise; {WHERE}"
    assert not hasattr(model, accelerate_apis._PREPARED)
    accelerator.prepare_model(model)
    with accelerate_apis.without_prepared_mark(model):
        accelerator.prepare_model(model, evaluation_mode=True)
    assert getattr(model, accelerate_apis._PREPARED), "what is prepared for training stays so"


def test_a_model_that_is_sharded_is_known_behind_a_compiled_one():
    """As accelerate asks before it shards a model."""
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(model)
    assert compiled._orig_mod is model, f"torch.compile keeps its model elsewhere in torch {torch.__version__}"
    assert not accelerate_apis.is_sharded_model(model)
    assert not accelerate_apis.is_sharded_model(compiled)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    assert accelerate_apis.is_sharded_model(model)
    assert accelerate_apis.is_sharded_model(compiled)


TRAIN_WITHOUT_THIS_PACKAGE = f"""
import runpy, sys
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
assert "hf_lowprec" not in sys.modules
"""


@pytest.mark.slow
def test_other_optimizers_are_untouched(tmp_path):
    """An FP32 run gives the same weights whether or not the package was imported."""
    words = f"--output_dir {tmp_path} --max_steps 4 --use_cpu --disable_tqdm True --report_to none --save_strategy no"
    without = run_script("imported_anew.py", TRAIN_WITHOUT_THIS_PACKAGE, *words.split())
    plain = without.splitlines()[-1]
    assert plain.startswith("steps=4 dtype=torch.float32")
    ours = run_script("train_tiny.py", *words.split())  # which finds the package imported
    assert ours.splitlines()[-1] == plain


OLD_VERSIONS = """
import sys, warnings
from importlib import metadata
import accelerate.utils.fsdp_utils, torch, transformers
installed, old = metadata.version, dict(word.split("=") for word in sys.argv[1:])
metadata.version = lambda name: old.get(name) or installed(name)
warnings.simplefilter("error", RuntimeWarning)
import hf_lowprec
from transformers import Trainer, TrainingArguments
print(Trainer.__init__.__globals__["__name__"])
weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
weight.grad = torch.ones_like(weight)
hf_lowprec.AdamW([weight], lr=1e-3, rounding="split").step()
hf_lowprec.cast_model(torch.nn.Linear(2, 2))
if "accelerate" in old:
    del accelerate.utils.fsdp_utils.get_parameters_from_modules
for use in (
    lambda: TrainingArguments("out", optim="adamw_bf16_split"),
    hf_lowprec.register,
    lambda: hf_lowprec.prepare_accelerator(accelerate.Accelerator(cpu=True)),
):
    try:
        use()
    except (ImportError, ValueError, RuntimeError) as error:
        print(error)
"""


@pytest.mark.parametrize(
    "versions",
    [
        {"transformers": "4.54.1", "accelerate": "1.6.0"},
        pytest.param({"transformers": "4.57.6"}, marks=pytest.mark.every_case),
        pytest.param({"accelerate": "1.10.1"}, marks=pytest.mark.every_case),
    ],
    ids=str,
)
def test_versions_that_are_too_old_for_trainer_are_named_when_they_are_needed_and_not_before(versions):
    first, *errors = run_script("imported_anew.py", OLD_VERSIONS, *map("=".join, versions.items())).splitlines()
    assert first == "transformers.trainer"
    needed = [f"{name}>={OLDEST[name]}, and this is {version}" for name, version in versions.items()]
    assert len(errors) == 2 + ("accelerate" in versions)
    for error in errors[:2]:
        assert f"the optim= names of hf_lowprec need {needed[0]}; " in error
        assert "hf_lowprec.AdamW" in error
    for error in errors[2:]:
        assert error.startswith(f"hf_lowprec.prepare_accelerator needs {needed[-1]} (")
        assert error.endswith("): pip install 'transformers>=5.5.4' 'accelerate>=1.11'")
