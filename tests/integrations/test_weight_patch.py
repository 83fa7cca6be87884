"""Patches of changed weights: copies that apply them have the trained weights, bit for bit."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hf_lowprec
from tests.support.processes.ranks import run_ranks
from tests.support.training.tiny_trainer import llama


def trained_model(lr: float, **options):
    model = llama()
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=lr, rounding="split", track_changes=True, **options)
    return model, optimizer


def steps(model, optimizer, *seeds: int) -> None:
    for seed in seeds:
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def copy_of(model) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same(model, weights) -> None:
    for name, param in model.named_parameters():
        kind = torch.int16 if param.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(param.detach().view(kind), weights[name].view(kind)), name


@pytest.mark.parametrize("lr", [1e-6, 1e-2])
def test_a_copy_follows_the_model(tmp_path, lr):
    model, optimizer = trained_model(lr)
    weights, version = copy_of(model), 0
    for target in (1, 3, 4):
        steps(model, optimizer, *range(version, target))
        patch = hf_lowprec.save_weight_patch(model, optimizer, tmp_path / "p", base=version, target=target)
        version = hf_lowprec.apply_weight_patch(tmp_path / "p", weights, base=version)
        assert version == target
        assert_same(model, weights)
        whole = sum(param.nbytes for param in model.parameters())
        assert patch.nbytes < (0.5 if lr == 1e-6 else 1.1) * whole
        assert 0 < patch.changed <= patch.weights == sum(param.numel() for param in model.parameters())


def test_the_file_is_what_vllm_takes(tmp_path):
    """Flat int32 indices, ascending, absolute BF16 values, and the full shape, by the names of the checkpoint."""
    model, optimizer = trained_model(1e-6)
    before = copy_of(model)
    steps(model, optimizer, 0)
    hf_lowprec.save_weight_patch(model, optimizer, tmp_path / "p", base=0, target=1)
    with safe_open(tmp_path / "p", "pt") as file:
        shapes = json.loads(file.metadata()["shapes"])
        assert {"base", "target", "format", "shapes"} == file.metadata().keys() and shapes
        for name, shape in shapes.items():
            indices, values = file.get_tensor(f"{name}.indices"), file.get_tensor(f"{name}.values")
            param = model.get_parameter(name).detach()
            assert (indices.dtype, values.dtype, shape) == (torch.int32, torch.bfloat16, list(param.shape))
            changed = (param.view(torch.int16) != before[name].view(torch.int16)).flatten().nonzero().flatten()
            assert torch.equal(indices.long(), changed) and torch.equal(values, param.flatten()[changed])


def test_what_does_not_fit_changes_nothing(tmp_path):
    model, optimizer = trained_model(1e-6)
    weights = copy_of(model)
    steps(model, optimizer, 0)
    hf_lowprec.save_weight_patch(model, optimizer, tmp_path / "p", base=5, target=6)
    name = next(name for name, param in model.named_parameters() if param.dtype == torch.bfloat16)
    save_file({"a": torch.ones(1)}, tmp_path / "other")
    save_file(
        {f"{name}.indices": torch.tensor([3, 10**6], dtype=torch.int32), f"{name}.values": torch.ones(2).bfloat16()},
        tmp_path / "outside",
        {
            "format": "hf_lowprec.patch.1",
            "base": "5",
            "target": "6",
            "shapes": json.dumps({name: [*weights[name].shape]}),
        },
    )
    before = {key: value.clone() for key, value in weights.items()}
    for path, base, target, message in (
        ("p", 4, weights, "leads from version 5, but the weights have version 4"),
        ("other", 5, weights, "is not a patch"),
        ("outside", 5, weights, "not ascending places"),
        ("p", 5, {key: value for key, value in weights.items() if key != name}, "among the weights it is missing"),
        ("p", 5, weights | {name: weights[name].float()}, "torch.float32"),
        ("p", 5, weights | {name: weights[name][1:]}, "of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_lowprec.apply_weight_patch(tmp_path / path, target, base=base)
    assert all(torch.equal(weights[key], before[key]) for key in before)
    with pytest.raises(ValueError, match="track_changes=True"):
        hf_lowprec.save_weight_patch(model, hf_lowprec.AdamW(model.parameters()), tmp_path / "q", base=0, target=1)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "kinds"), [(3, "ddp,fsdp2"), (4, "hsdp")])
def test_patches_of_several_ranks_are_those_of_one(tmp_path, ranks, kinds):
    printed = run_ranks("weight_patches_on_ranks.py", ranks, kinds, str(tmp_path))
    assert printed.splitlines() == [f"{kind}: 3 patches agree" for kind in kinds.split(",")]
