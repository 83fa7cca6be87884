"""What is read of the files of a checkpoint, without running what they name, or reading outside of it."""

import json
import pickle
from pathlib import PosixPath
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import hf_lowprec
from hf_lowprec.integrations.checkpoint_files.stored_optimizer import StoredParameter, read_optimizer
from hf_lowprec.integrations.checkpoint_files.stored_tensors import ShardedFolder, open_weights, read_metadata
from hf_lowprec.integrations.transformers.checkpoints.load import load_best
from hf_lowprec.integrations.transformers.checkpoints.resume import choose_checkpoint
from tests.support.planted_pickles import Creates

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def test_metadata_has_nothing_but_what_its_reader_allows(tmp_path):
    """It is a pickle; torch's own reader runs whatever it names."""
    names = "float32 bfloat16 float16 int64 int16 int8 uint8 bool"
    tensors = {name: torch.zeros(2, 3, dtype=getattr(torch, name)) for name in names.split()}
    state = {"tensors": tensors, "groups": [{"lr": 1.0, "betas": (0.9, 0.99), "name": None}]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    expected = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert len(expected.state_dict_metadata) == len(tensors) + 3
    assert read_metadata(tmp_path) == expected
    text, own = pickle.dumps(expected, protocol=2), f"{PosixPath.__module__}\nPosixPath\n".encode()
    for other in (b"pathlib\nWindowsPath\n", b"pathlib._local\nPosixPath\n"):  # of Windows, of Python 3.13
        assert own in text
        (tmp_path / ".metadata").write_bytes(text.replace(own, other))
        assert read_metadata(tmp_path) == expected
    for name in ("../other/__0_0.distcp", str(tmp_path / "__0_0.distcp")):
        for part in expected.storage_data.values():
            part.relative_path = name
        (tmp_path / ".metadata").write_bytes(pickle.dumps(expected))
        with pytest.raises(ValueError, match=rf"\.metadata cannot be read: .*{name}', which is outside"):
            read_metadata(tmp_path)


def test_nothing_is_run_when_shards_are_read(tmp_path):
    """Neither from the metadata, nor from an object among the tensors; a run does not resume from them either."""
    folder, marker = tmp_path / "optimizer_0", tmp_path / "marker"
    (tmp_path / "trainer_state.json").write_text("{}")
    dcp.save({"optimizer": {"state": torch.ones(2), "lr": Creates(marker)}}, checkpoint_id=folder, no_dist=True)
    for act in (
        lambda: ShardedFolder(folder).read(("optimizer", "lr")),
        lambda: ShardedFolder(folder).outline("optimizer"),
    ):
        with pytest.raises(
            ValueError, match=r"optimizer_0 cannot be read: it names io\.open, which checkpoints do not"
        ):
            act()
    with pytest.raises(ValueError, match=r"is not loaded: \S+optimizer_0 cannot be read: it names io\.open"):
        choose_checkpoint(str(tmp_path), "out")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["more"] = Creates(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: it names io\.open"):
        ShardedFolder(folder)
    best = SimpleNamespace(optimizer=None, state=SimpleNamespace(best_model_checkpoint=str(tmp_path)))
    for act in (lambda: choose_checkpoint(str(tmp_path), "out"), lambda: load_best(None, best)):
        with pytest.raises(ValueError, match=r"is not loaded: \S+\.metadata cannot be read: it names io\.open"):
            act()
    assert not marker.exists()


def test_an_index_without_a_map(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match=r"index\.json cannot be read: it has no weight_map"):
        open_weights(tmp_path)


def stepped_and_saved(tmp_path, optimizer, *without_gradient) -> list[StoredParameter]:
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = None if param in {*without_gradient} else torch.ones_like(param)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    return read_optimizer(tmp_path / "optimizer.pt").parameters


def test_numbers_beside_the_states_are_none(tmp_path):
    (stored,) = stepped_and_saved(tmp_path, torch.optim.NAdam([nn.Parameter(torch.zeros(2))]))  # with `mu_product`
    assert stored.infos == dict.fromkeys(("exp_avg", "exp_avg_sq"), ((2,), torch.float32)) and stored.step == 1


def test_a_scalar_has_states(tmp_path):
    scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))
    (stored,) = stepped_and_saved(tmp_path, hf_lowprec.AdamW([scale], rounding="split"))
    assert {name: tuple(info.shape) for name, info in stored.infos.items()} == {
        "exp_avg": (), "exp_avg_sq": (), "remainder": (),
    }  # fmt: skip


@pytest.mark.parametrize("rounding", ["kahan", "split"])
def test_estimates_of_stepped_and_other_weights(tmp_path, rounding):
    model = nn.Linear(64, 64)
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3, rounding=rounding)
    stored = stepped_and_saved(tmp_path, optimizer, model.bias)
    expected = hf_lowprec.fp32_state_dict(model, optimizer)
    for one, (name, param) in zip(stored, model.named_parameters(), strict=True):
        assert not torch.equal(expected[name], param.float())
        assert torch.equal(one.estimate(param.detach().clone()), expected[name])
