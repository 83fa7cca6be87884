"""Defects, each made by real training, are found by name; an optimizer of torch in BF16 has most of them."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from hf_lowprec.tools.inspection.findings_in_two import findings_in_two
from hf_lowprec.tools.inspection.inspect_checkpoints import inspect_checkpoints
from hf_lowprec.tools.inspection.training_record import Hyperparameters
from tests.support.training.tiny_trainer import arguments, counting_data, llama

BF16 = torch.bfloat16
STEPS = 40


def findings(*folders, **given):
    """The tensors of each finding by its code."""
    inspection = inspect_checkpoints(*map(str, folders), given=Hyperparameters(**given))
    found = {finding.code: [*finding.tensors] for finding in inspection.findings}
    assert len(found) == len(inspection.findings)
    for finding in inspection.findings:
        assert "{" not in finding.message and finding.message.endswith(".")
    return found


def run(folder, model, optim="adamw_torch", learning_rate=1e-4, rows=64, callbacks=None, **options):
    """Train a model; its weights at the start and at the end, and checkpoints in the middle and at the end."""
    model.save_pretrained(folder / "start")
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2, "max_steps": STEPS, "logging_steps": 2}
    args = arguments(folder, optim=optim, learning_rate=learning_rate, **saving, **options)
    trainer = Trainer(model, args, train_dataset=counting_data(rows), callbacks=callbacks)
    trainer.train()
    trainer.save_model(folder / "end")
    return tuple(folder / name for name in ("start", "end", f"checkpoint-{STEPS // 2}", f"checkpoint-{STEPS}"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """BF16 weights with torch's AdamW at a learning rate of fine-tuning."""
    folder = tmp_path_factory.mktemp("stock")
    return llama(), run(folder, llama().to(BF16), learning_rate=1e-6, weight_decay=0.1)


def names_of(model, *parts):
    return {name for name, _ in model.named_parameters() if any(part in name for part in parts)}


def test_torch_in_bf16_by_its_checkpoint(stock):
    model, (_, _, _, last) = stock
    found = findings(last)
    matrices = names_of(model, "proj", "embed", "lm_head")
    assert {*found["norms_never_moved"]} == names_of(model, "norm")
    assert {*found["second_moment_frozen"]} == names_of(model, "")
    assert {*found["updates_lost"]} == names_of(model, "")
    assert {*found["weight_decay_lost"]} == matrices
    assert len(found) == 4


def test_torch_in_bf16_by_its_weights(stock):
    model, (start, end, _, last) = stock
    found = findings(start, end)
    assert {*found["norms_never_moved"]} == names_of(model, "norm")
    assert {*found["updates_lost"]} == names_of(model, "proj", "embed", "lm_head")
    assert len(found) == 2
    both = findings(start, last)
    assert {*both["norms_never_moved"]} == names_of(model, "norm")


def second_moments(tmp_path, model, optim, **options):
    """How they change between two checkpoints while gradients shrink quickly, and those that are found frozen."""
    *_, middle, last = run(tmp_path, model, optim, 1e-2, **options)
    comparison = inspect_checkpoints(str(middle), str(last)).comparison
    found = {finding.code: [*finding.tensors] for finding in findings_in_two(comparison)}
    return comparison.second_moments, found.get("second_moment_frozen", [])


def test_a_second_moment_that_stands_still_between_checkpoints(tmp_path):
    """Seen in the values. The list of findings has the one that says why, about the same tensors."""
    changes, frozen = second_moments(tmp_path, llama().to(BF16), "adamw_torch")
    assert all(change.decreased == 0 and change.steps == STEPS // 2 for change in changes.values())
    assert {*frozen} == {name for name, change in changes.items() if change.unchanged >= 20}
    assert "model.embed_tokens.weight" in frozen and len(frozen) > 3


@pytest.mark.parametrize(
    ("optim", "optim_args", "least"),
    [
        ("adamw_bf16_kahan", None, 200),
        ("adamw_bf16_sr", None, 200),
        ("adamw_bf16_sr", "state_dtype=int8", 100),  # codes are far apart, so that an element decays seldom
        ("adamw_torch", None, 200),
    ],
)
def test_a_second_moment_that_decays(tmp_path, optim, optim_args, least):
    changes, frozen = second_moments(tmp_path, llama(), optim, optim_args=optim_args)
    assert frozen == [] and len(changes) == 21
    assert changes["model.embed_tokens.weight"].decreased > least


def test_state_rounding_nearest(tmp_path):
    model = llama()
    *_, last = run(tmp_path, model, optim="adamw_bf16_kahan", optim_args="state_rounding=nearest")
    assert {*findings(last)["second_moment_frozen"]} == names_of(model, "proj", "embed", "lm_head")


def test_rounding_nearest(tmp_path):
    model = llama()
    start, end, _, last = run(tmp_path, model, "adamw_bf16_kahan", 1e-6, optim_args="rounding=nearest")
    for folders in ((start, end), (last,), (start, last)):
        assert {*findings(*folders)["updates_lost"]} == names_of(model, "proj", "embed", "lm_head")


@pytest.mark.parametrize(
    ("optim", "name"),
    [
        ("adamw_torch", "model.norm.weight"),
        ("adamw_bf16_kahan", "model.layers.1.post_attention_layernorm.weight"),
        ("adamw_bf16_sr", "model.norm.weight"),
    ],
)
def test_a_frozen_norm(tmp_path, optim, name):
    model = llama()
    model.get_parameter(name).requires_grad_(False)
    start, end, middle, last = run(tmp_path, model, optim=optim)
    for folders in ((start, end), (start, last), (middle, last)):
        assert findings(*folders) == {"norms_never_moved": [name]}
    for folder in (end, last):
        assert findings(folder) == {"norms_never_moved": [name]}


@pytest.mark.parametrize(
    ("optim", "name"),
    [
        ("adamw_torch", "model.layers.0.mlp.up_proj.weight"),
        ("adamw_bf16_kahan", "lm_head.weight"),
        ("adamw_bf16_sr", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_tensor_that_nothing_moves(tmp_path, optim, name):
    model = llama()
    model.get_parameter(name).requires_grad_(False)
    start, end, middle, last = run(tmp_path, model, optim=optim)
    for folders in ((start, end), (start, last), (middle, last)):
        assert findings(*folders) == {"never_moved": [name]}


class Undo(TrainerCallback):
    """Takes back every step of one weight."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weight = model.model.embed_tokens.weight
        self.original = self.weight.detach().clone()

    def on_step_end(self, args, state, control, **kwargs):
        self.weight.data.copy_(self.original)


def test_a_tensor_that_is_stepped_and_does_not_move(tmp_path):
    """Embeddings that are frozen are ordinary; embeddings that the optimizer steps are not."""
    start, end, middle, last = run(tmp_path / "undone", llama(), callbacks=[Undo()])
    assert findings(start, last) == findings(middle, last) == {"never_moved": ["model.embed_tokens.weight"]}
    frozen = llama()
    frozen.model.embed_tokens.requires_grad_(False)
    start, end, middle, last = run(tmp_path / "frozen", frozen)
    assert findings(start, end) == findings(start, last) == {}


def test_frozen_layers_are_ordinary(tmp_path):
    model = llama()
    model.model.layers[0].requires_grad_(False)
    start, end, _, last = run(tmp_path, model, optim="adamw_bf16_kahan")
    assert findings(start, end) == findings(start, last) == findings(last) == {}


def test_a_head_left_in_fp32(tmp_path):
    model = llama()
    start, end, _, last = run(tmp_path, model, optim="adamw_bf16_kahan", optim_args="keep_fp32=lm_head")
    for folders in ((end,), (last,), (start, end), (start, last)):
        assert findings(*folders) == {"left_in_fp32": ["lm_head.weight"]}


def test_a_norm_left_in_bf16(tmp_path):
    model = llama()
    _, end, *_ = run(tmp_path, model, "adamw_bf16_kahan", 1e-2)
    weights = load_file(end / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(BF16)
    save_file(weights, end / "model.safetensors", metadata={"format": "pt"})
    assert findings(end) == {"norms_of_16_bits": ["model.norm.weight"]}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_decay_that_does_not_arrive(tmp_path, optim):
    """Rows of tokens that the data do not have get no gradient, only the decay."""
    start, end, _, last = run(tmp_path, llama().to(BF16), optim, 1e-3, weight_decay=2.0, rows=1)
    assert findings(start, last)["weight_decay_lost"] == ["model.embed_tokens.weight"] or optim == "adamw_torch"
    assert "model.embed_tokens.weight" in findings(start, last)["weight_decay_lost"]
    given = {"lr": 5e-4, "weight_decay": 2.0, "steps": STEPS}
    assert "weight_decay_lost" not in findings(start, end)
    assert findings(start, end, **given)["weight_decay_lost"] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", "adamw_bf16_sr", "adamw_torch"])
def test_a_decay_that_arrives(tmp_path, optim):
    _, _, middle, last = run(tmp_path, llama(), optim, 1e-3, weight_decay=2.0, rows=1)
    inspection = inspect_checkpoints(str(middle), str(last))
    change = inspection.comparison.changes["model.embed_tokens.weight"]
    assert not inspection.findings and change.shrunk > 500 and change.shrunk_not_moved < change.shrunk / 4


def test_nothing_moved(tmp_path):
    llama().save_pretrained(tmp_path / "a")
    llama().save_pretrained(tmp_path / "b")
    assert [*findings(tmp_path / "a", tmp_path / "b")] == ["nothing_moved"]


def test_values_that_are_not_finite(tmp_path):
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    model.lm_head.weight.data[0, 0] = torch.inf
    model.save_pretrained(tmp_path)
    assert {*findings(tmp_path)["not_finite"]} == {"model.layers.1.mlp.up_proj.weight", "lm_head.weight"}


def test_every_norm_at_its_initial_value_in_a_trained_model(tmp_path):
    """Without optimizer state, a model that was trained differs from a fresh one by its matrices."""
    model = llama()
    model.save_pretrained(tmp_path / "fresh")
    assert findings(tmp_path / "fresh") == {}
    for scale, layer in enumerate(model.model.layers, 1):
        layer.mlp.up_proj.weight.data *= scale
    model.save_pretrained(tmp_path / "trained")
    assert {*findings(tmp_path / "trained")["norms_never_moved"]} == names_of(model, "norm")
