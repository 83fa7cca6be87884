"""What the sentences about a checkpoint's optimizer call the low bits of weights."""

import pytest
import torch

from hf_lowprec.optim.state.states_in_8_bits import decoded_states, dtype_in
from hf_lowprec.rounding import LOW_PRECISION_DTYPES
from hf_lowprec.tools.inspection.inspect_checkpoints import inspect_checkpoints
from hf_lowprec.tools.inspection.tables import lines_on_one
from hf_lowprec.tools.inspection.training_record import Hyperparameters
from tests.support.training.tiny_trainer import llama, optimizer_of, trained


@pytest.mark.parametrize(
    ("mode", "state", "kind"),
    [
        ("kahan", "compensation in bfloat16", "compensation"),
        ("split", "remainder in int16", "remainder"),
    ],
)
def test_compensations_and_remainders_are_told_apart(tmp_path, mode, state, kind):
    options = {"optim": f"adamw_bf16_{mode}", "optim_args": "state_dtype=int8"}
    trainer = trained(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **options)
    (facts,), _, _ = inspect_checkpoints(str(tmp_path / "checkpoint-1"))
    (line,) = (line for line in lines_on_one(facts) if line.startswith("Optimizer state: "))
    parameters = dict(trainer.model.named_parameters())
    low = sum(parameter.dtype in LOW_PRECISION_DTYPES for parameter in parameters.values())
    assert f", {state} " in line
    assert line.endswith(f"; {kind} of {low} tensors.")
    held = optimizer_of(trainer).state
    for each in facts.states:
        tensors = {key: value for key, value in held[parameters[each.name]].items() if key != "step"}
        assert each.nbytes == sum(tensor.nbytes for tensor in tensors.values())
        assert each.dtypes == {name: dtype_in(tensors, name) for name in decoded_states(tensors)}


@pytest.mark.parametrize(
    ("dtype", "keeping", "mode"),
    [
        (torch.bfloat16, "; split weights, Kahan summation and stochastic rounding keep them.", "split"),
        (torch.float16, "; Kahan summation keeps them.", "kahan"),
    ],
)
def test_advice_names_modes_that_the_dtype_supports(tmp_path, dtype, keeping, mode):
    for name in ("start", "end"):
        llama().to(dtype).save_pretrained(tmp_path / name)
    hyperparameters = Hyperparameters(steps=10)
    (facts, _), _, findings = inspect_checkpoints(str(tmp_path / "start"), str(tmp_path / "end"), given=hyperparameters)
    (line,) = (line for line in lines_on_one(facts) if line.startswith("Rounding to nearest"))
    assert line.endswith(keeping)
    (message,) = (finding.message for finding in findings if finding.code == "nothing_moved")
    assert f'Train with optim="adamw_bf16_{mode}" (hf_lowprec.AdamW with rounding="{mode}")' in message
