"""Each finding once, on a defect made by real training; runs of the stock Trainer and of ours, and ordinary things.

What is counted in a tensor, against rounding and subtraction of every element.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Trainer,
    TrainerCallback,
)

import hf_lowprec
from hf_lowprec.integrations.checkpoint_files.input_files import InputError
from hf_lowprec.tools import inspection
from hf_lowprec.tools.inspection import inspect_checkpoints, tensor_facts
from tests.integrations.export.test_checkpoint_export import accelerate_state
from tests.support.training.tiny_trainer import LENGTH, arguments, counting_data, llama

BF16 = torch.bfloat16
STEPS = 20


def findings(*folders) -> dict[str, set[str]]:
    """The tensors of each finding by its code."""
    found = inspect_checkpoints(*map(str, folders)).findings
    assert all("{" not in finding.message and finding.message.endswith(".") for finding in found)
    assert len({finding.code for finding in found}) == len(found)
    return {finding.code: {*finding.tensors} for finding in found}


def run(folder, model, optim="adamw_torch", learning_rate=1e-4, callbacks=None, **options):
    """Train a model. Returns folders: its weights before and after, and a checkpoint at the end."""
    model.save_pretrained(folder / "start")
    saving = {"save_strategy": "steps", "save_steps": STEPS, "max_steps": STEPS}
    args = arguments(folder, optim=optim, learning_rate=learning_rate, **saving, **options)
    trainer = Trainer(model, args, train_dataset=counting_data(), callbacks=callbacks)
    trainer.train()
    trainer.save_model(folder / "end")
    return folder / "start", folder / "end", folder / f"checkpoint-{STEPS}"


def names_of(*parts):
    return {name for name, _ in llama().named_parameters() if any(part in name for part in parts)}


MATRICES = names_of("proj", "embed", "lm_head")


@pytest.mark.parametrize("fused", [False, True])
def test_torch_in_bf16(tmp_path, fused):
    optim = "adamw_torch_fused" if fused else "adamw_torch"
    start, end, last = run(tmp_path, llama().to(BF16), optim, learning_rate=1e-6, weight_decay=0.1)
    by_checkpoint = {
        "norms_never_moved": names_of("norm"),
        "updates_lost": names_of(""),
        "second_moment_frozen": names_of(""),
    } | ({} if fused else {"weight_decay_lost": MATRICES})
    assert findings(last) == findings(start, last) == by_checkpoint
    assert findings(start, end) == {"norms_never_moved": names_of("norm"), "updates_lost": MATRICES}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bf16_split", "adamw_bf16_kahan", "adamw_bf16_sr"])
def test_a_healthy_run(tmp_path, optim):
    """In FP32 with torch, in BF16 with ours; with frozen layers and embeddings, at a small learning rate."""
    model = llama()
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    start, end, last = run(tmp_path, model, optim, 1e-5, weight_decay=0.1)
    for folders in ((start,), (end,), (last,), (start, end), (start, last)):
        assert findings(*folders) == {}
    parts = {(row["part"], row["dtype"]): row for row in inspect_checkpoints(str(start), str(last)).parts}
    assert parts["embeddings", "float32" if optim == "adamw_torch" else "bfloat16"]["moved"] == 0
    assert parts["norms", "float32"]["moved"] > 0.3 and parts["norms", "float32"]["distance"] < 1e-3


def test_ours_rounded_to_nearest(tmp_path):
    options = "rounding=nearest,state_rounding=nearest"
    start, end, last = run(tmp_path, llama(), "adamw_bf16_kahan", 1e-6, optim_args=options)
    assert findings(last) == findings(start, last) == {"updates_lost": MATRICES, "second_moment_frozen": MATRICES}
    assert findings(start, end) == {"updates_lost": MATRICES}


@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic", "nearest"])
def test_norms_in_16_bits_move_later_unless_rounded_to_nearest(tmp_path, rounding):
    """After one small step, a compensation or remainder holds the update, or chance has moved no norm yet."""
    model = llama().to(BF16)
    model.save_pretrained(tmp_path / "start")
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-6, rounding=rounding)
    model(torch.arange(LENGTH)[None], labels=torch.arange(LENGTH)[None]).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "end")
    torch.save(optimizer.state_dict(), tmp_path / "end/optimizer.pt")
    for folders in (("end",), ("start", "end")):
        assert ("norms_never_moved" in findings(*(tmp_path / f for f in folders))) == (rounding == "nearest")


class Undo(TrainerCallback):
    """Takes back every step of one weight."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weight = model.model.embed_tokens.weight
        self.original = self.weight.detach().clone()

    def on_step_end(self, args, state, control, **kwargs):
        self.weight.data.copy_(self.original)


def test_a_tensor_that_is_stepped_and_does_not_move(tmp_path):
    start, _, last = run(tmp_path, llama(), callbacks=[Undo()])
    assert findings(start, last) == {"never_moved": {"model.embed_tokens.weight"}}


def test_nothing_moved(tmp_path):
    llama().save_pretrained(tmp_path / "a")
    llama().save_pretrained(tmp_path / "b")
    assert [*findings(tmp_path / "a", tmp_path / "b")] == ["nothing_moved"]


def test_values_that_are_not_finite(tmp_path):
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    model.lm_head.weight.data[0, 0] = torch.inf
    model.save_pretrained(tmp_path)
    assert findings(tmp_path) == {"not_finite": {"model.layers.1.mlp.up_proj.weight", "lm_head.weight"}}


def test_a_head_left_in_fp32_and_a_norm_in_bf16(tmp_path):
    _, end, last = run(tmp_path, llama(), "adamw_bf16_kahan", 1e-2, optim_args="keep_fp32=lm_head")
    assert findings(end) == findings(last) == {"left_in_fp32": {"lm_head.weight"}}
    weights = load_file(end / "model.safetensors")
    weights["lm_head.weight"], norm = weights["lm_head.weight"].to(BF16), "model.norm.weight"
    weights[norm] = weights[norm].to(BF16)
    save_file(weights, end / "model.safetensors", metadata={"format": "pt"})
    assert findings(end) == {"norms_of_16_bits": {norm}}


def test_fp32_by_design(tmp_path):
    """T5 keeps `wo` in FP32, which transformers knows; a model of unknown class is judged by names."""
    config = AutoConfig.for_model("t5", d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16, vocab_size=64)
    model = AutoModel.from_config(config)
    hf_lowprec.cast_model(model)
    model.save_pretrained(tmp_path)
    assert findings(tmp_path) == {}
    (tmp_path / "config.json").unlink()
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"unknown": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert findings(tmp_path)["left_in_fp32"] == {name for name in weights if "wo.weight" in name}


def test_merged_adapters_are_no_defect(tmp_path):
    """They move matrices of the layers and nothing else."""
    model = llama().to(BF16)
    model.save_pretrained(tmp_path / "base")
    for name, param in model.named_parameters():
        if "proj" in name:
            param.data += 0.01 * torch.randn(param.shape).to(BF16)
    model.save_pretrained(tmp_path / "merged")
    assert findings(tmp_path / "base", tmp_path / "merged") == {}


def test_fp32_training_that_was_published_in_bf16_is_no_defect(tmp_path):
    """Its displacements are smaller than most spacings, as those of rounding to nearest, but not equally large."""
    model = llama().to(BF16)
    model.save_pretrained(tmp_path / "base")
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
        param.data = (param.float() + 3e-5 * noise + (0.1 if param.dim() == 1 else 0) * noise).to(BF16)
    model.save_pretrained(tmp_path / "tuned")
    assert findings(tmp_path / "base", tmp_path / "tuned") == {}


def test_states_of_accelerate(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "start")
    accelerate_state(tmp_path / "state", model, steps=3)
    found = inspect_checkpoints(str(tmp_path / "start"), str(tmp_path / "state"))
    assert (found.rate, found.findings) == (1e-3, []) and all(row["moved"] > 0 for row in found.parts)


@pytest.mark.distributed
@pytest.mark.slow
def test_adapters(tmp_path):
    pytest.importorskip("peft")
    from tests.support.training.peft_adapters import adapted

    *_, last = run(tmp_path, adapted("lora", BF16), "adamw_bf16_kahan", 1e-3)
    found = inspect_checkpoints(str(last))
    assert {row["part"] for row in found.parts} == {"adapters"} and (found.rate, found.findings) == (1e-3, [])


def test_a_base_model_has_names_without_prefix(tmp_path):
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=64)
    BertModel(config).save_pretrained(tmp_path / "base")
    BertForSequenceClassification(config).save_pretrained(tmp_path / "tuned")
    parts = inspect_checkpoints(str(tmp_path / "base"), str(tmp_path / "tuned")).parts
    assert next(row["moved"] for row in parts if row["part"] == "mlp") > 0.4
    llama().save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="no tensor of the same name and shape"):
        findings(tmp_path / "base", tmp_path / "other")


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(999, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_lost_weights_are_those_that_rounding_leaves_where_they_are(dtype, monkeypatch):
    monkeypatch.setattr(inspection, "CHUNK", 100)
    weights = numbers(0).to(dtype)
    update = torch.finfo(dtype).eps / 4
    lost = sum((weight + update) == weight for weight in weights.to(dtype))  # torch rounds to nearest
    assert tensor_facts(weights, update).lost == int(lost) and 100 < lost < 900


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_what_moved_and_how_far(dtype, monkeypatch):
    monkeypatch.setattr(inspection, "CHUNK", 100)
    earlier, later = numbers(0), numbers(0).to(dtype)
    later[::3] += numbers(1).to(dtype)[::3].abs() + 1
    facts = tensor_facts(later, 0.0, earlier)
    before = earlier.to(dtype).double()
    assert facts.moved == 333 == int(facts.exponents[1].sum()) and int(facts.exponents.sum()) == 999
    assert facts.distance == pytest.approx(float((later.double() - before).square().sum()), rel=1e-5)
    assert facts.norm == pytest.approx(float(before.square().sum()), rel=1e-5)
    assert int(facts.exponents[:, 127].sum()) == int(((before.abs() >= 1) & (before.abs() < 2)).sum())


def test_values_at_the_start_and_not_finite():
    ones, zeros = torch.ones(7), torch.zeros(7)
    assert tensor_facts(ones, 0.0).at_start and tensor_facts(zeros, 0.0).at_start
    assert not tensor_facts(torch.cat((ones, zeros)), 0.0).at_start and not tensor_facts(torch.empty(0), 0.0).at_start
    assert tensor_facts(torch.tensor([1, torch.nan, -torch.inf]), 0.0).nonfinite == 2
    assert tensor_facts(ones, 0.0).moved is None
