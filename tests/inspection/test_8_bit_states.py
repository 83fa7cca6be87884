"""Checkpoints with states in 8 bits: bytes count the scales, and values are decoded."""

import torch
import torch.distributed.checkpoint as dcp

from hf_lowprec.integrations.checkpoint_files.stored_weights import open_weights
from hf_lowprec.optim.state.states_in_8_bits import decoded_states, dtype_in
from hf_lowprec.tools.doctor.update_sizes import saved_directions
from hf_lowprec.tools.inspection.inspect_checkpoints import inspect_checkpoints
from hf_lowprec.tools.inspection.optimizer_states import read_parameter_states
from tests.support.training.tiny_trainer import optimizer_of, trained

INT8 = torch.int8


def test_a_checkpoint_of_trainer(tmp_path):
    options = {"optim": "adamw_bf16_kahan", "optim_args": "state_dtype=int8"}
    trainer = trained(tmp_path, max_steps=4, save_strategy="steps", save_steps=4, **options)
    folder = tmp_path / "checkpoint-4"
    (facts,), _, findings = inspect_checkpoints(str(folder))
    assert findings == []
    parameters, optimizer = dict(trainer.model.named_parameters()), optimizer_of(trainer)
    for state in facts.states:
        held = {k: v for k, v in optimizer.state[parameters[state.name]].items() if k != "step"}
        assert state.dtypes == {name: dtype_in(held, name) for name in decoded_states(held)}
        assert state.nbytes == sum(tensor.nbytes for tensor in held.values())
        assert (state.dtypes["exp_avg"] == INT8) == ("norm" not in state.name)
    directions = saved_directions(folder, open_weights(folder))
    values = [decoded_states(optimizer.state[parameters[state.name]]) for state in facts.states]
    expected = [  # bias-corrected by hand
        v["exp_avg"].double().abs() / (1 - 0.9**4) / ((v["exp_avg_sq"].double() / (1 - 0.999**4)).sqrt() + 1e-8)
        for v in values
    ]
    largest, found = max(each.max() for each in expected), directions["all"]
    assert 0 < found.max() <= largest * (1 + 1e-6)

    named = {"state": {}, "param_groups": trainer.optimizer.state_dict()["param_groups"]}
    saved, position = trainer.optimizer.state_dict(), 0
    names = [state.name for state in facts.states]
    for group in named["param_groups"]:
        group["params"] = [names[position + k] for k in range(len(group["params"]))]
        position += len(group["params"])
    named["state"] = dict(zip(names, saved["state"].values(), strict=True))
    dcp.save({"optimizer": named}, checkpoint_id=tmp_path / "sharded/optimizer_0", no_dist=True)
    for state, value in zip(read_parameter_states(tmp_path / "sharded"), values, strict=True):
        assert state.infos.keys() == value.keys() - {"step"}
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state.read(name), value[name])
