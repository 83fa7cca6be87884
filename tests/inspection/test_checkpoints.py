"""Checkpoints of every kind are opened, and two of different kinds compared."""

import re

import huggingface_hub
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, BertConfig, BertForSequenceClassification, BertModel

import hf_lowprec
from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.tools.inspection import tensor_facts
from hf_lowprec.tools.inspection.checkpoint import open_checkpoint
from hf_lowprec.tools.inspection.inspect_checkpoints import inspect_checkpoints
from hf_lowprec.tools.inspection.optimizer_states import ParamGroupSettings
from hf_lowprec.tools.inspection.training_record import Hyperparameters
from tests.scripts import trainer_ranks
from tests.support.processes.ranks import run_ranks
from tests.support.training.tiny_trainer import LENGTH, llama, trained

BF16 = torch.bfloat16


def inspect(*folders, **given):
    return inspect_checkpoints(*map(str, folders), given=Hyperparameters(**given))


def refused(*folders) -> str:
    with pytest.raises(InputError) as error:
        inspect(*folders)
    return str(error.value)


def test_a_checkpoint_of_trainer(tmp_path):
    trainer = trained(
        tmp_path, optim="adamw_bf16_kahan", max_steps=4, save_strategy="steps", save_steps=4, weight_decay=0.1
    )
    (facts,), comparison, findings = inspect(tmp_path / "checkpoint-4")
    parameters = dict(trainer.model.named_parameters())
    assert {name: (t.shape, t.dtype) for name, t in facts.tensors.items()} == {
        name: (param.shape, param.dtype) for name, param in parameters.items()
    }
    assert (comparison, findings, facts.step, facts.update) == (None, [], 4, 1e-2)
    assert {state.name for state in facts.states} == parameters.keys()
    optimizer = trainer.optimizer.optimizer
    for state in facts.states:
        held = {k: v for k, v in optimizer.state[parameters[state.name]].items() if k != "step"}
        assert state.dtypes == {name: tensor.dtype for name, tensor in held.items()}
        assert state.nbytes == sum(tensor.nbytes for tensor in held.values())
        assert (state.step, state.group.rounding, state.group.beta2) == (4, "kahan", 0.999)
        assert state.group.weight_decay == (0 if "norm" in state.name else 0.1)
        assert state.compensation == ("norm" not in state.name) and state.has_gradients


def test_names_come_from_the_order_of_trainer_or_of_the_model(tmp_path):
    """Checkpoints of other optimizers have no names."""
    trained(tmp_path / "a", optim="adamw_torch", max_steps=2, save_strategy="steps", save_steps=2, weight_decay=0.1)
    (facts,), *_ = inspect(tmp_path / "a/checkpoint-2")
    model = llama()
    assert {state.name for state in facts.states} == {name for name, _ in model.named_parameters()}
    assert {state.name for state in facts.states if not state.group.weight_decay} == {
        name for name, _ in model.named_parameters() if "norm" in name
    }
    folder = tmp_path / "b"
    model.save_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(LENGTH)[None], labels=torch.arange(LENGTH)[None]).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    (facts,), *_ = inspect(folder)
    assert [state.name for state in facts.states] == [name for name, _ in model.named_parameters()]
    (folder / "config.json").unlink()
    (facts,), *_ = inspect(folder)
    assert [state.name for state in facts.states] == [f"parameter {k}" for k in range(21)] and not facts.state_of


def test_states_of_accelerate(tmp_path):
    accelerator, model = Accelerator(cpu=True), llama()
    model.save_pretrained(tmp_path / "start")
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        accelerator.backward(model(torch.arange(LENGTH)[None], labels=torch.arange(LENGTH)[None]).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "state"))
    _, comparison, findings = inspect(tmp_path / "start", tmp_path / "state")
    assert (comparison.steps, findings) == (3, []) and all(change.moved for change in comparison.changes.values())
    assert "16 tensors have different dtypes" in comparison.notes[0] and "bfloat16" in comparison.notes[0]


@pytest.mark.distributed
@pytest.mark.slow
def test_sharded_and_safetensors(tmp_path):
    """A sharded state of two ranks, and the model folder that the run began with."""
    trainer_ranks.llama().save_pretrained(tmp_path / "start")
    run_ranks("exported_on_ranks.py", 2, "fsdp2", "sharded", str(tmp_path))
    (start, state), comparison, findings = inspect(tmp_path / "start", tmp_path / "state")
    assert findings == [] and comparison.changes.keys() == start.tensors.keys() == state.tensors.keys()
    assert all(change.moved for change in comparison.changes.values())
    assert {s.name for s in state.states} == state.tensors.keys()
    assert all(s.step == 3 and s.compensation == ("norm" not in s.name) for s in state.states)


def test_adapters(tmp_path):
    pytest.importorskip("peft")
    from tests.support.training.peft_adapters import adapted

    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    trained(tmp_path, model=adapted("lora", BF16), optim="adamw_bf16_kahan", learning_rate=1e-3, **saving)
    (facts, _), comparison, findings = inspect(tmp_path / "checkpoint-4", tmp_path / "checkpoint-8")
    assert {*facts.kinds.values()} == {"adapters"} and findings == []
    assert {state.name for state in facts.states} == facts.tensors.keys() == comparison.changes.keys()
    assert all(change.moved for change in comparison.changes.values())


def test_merged_adapters_are_no_defect(tmp_path):
    """They move matrices of the layers and nothing else."""
    model = llama().to(BF16)
    model.save_pretrained(tmp_path / "base")
    for name, param in model.named_parameters():
        if "proj" in name:
            param.data += 0.01 * torch.randn(param.shape).to(BF16)
    model.save_pretrained(tmp_path / "merged")
    assert inspect(tmp_path / "base", tmp_path / "merged").findings == []


def test_fp32_training_that_was_published_in_bf16_is_no_defect(tmp_path):
    """Its displacements are smaller than most spacings, as those of rounding to nearest, but not equally large."""
    model = llama().to(BF16)
    model.save_pretrained(tmp_path / "base")
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
        param.data = (param.float() + 3e-5 * noise + (0.1 if param.dim() == 1 else 0) * noise).to(BF16)
    model.save_pretrained(tmp_path / "tuned")
    _, comparison, findings = inspect(tmp_path / "base", tmp_path / "tuned")
    moved = sum(change.moved for change in comparison.changes.values())
    assert findings == [] and 0.02 < moved / sum(change.parameters for change in comparison.changes.values()) < 0.5


def test_names_with_the_prefix_of_a_base_model(tmp_path):
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64)
    BertModel(config).save_pretrained(tmp_path / "base")
    BertForSequenceClassification(config).save_pretrained(tmp_path / "tuned")
    _, comparison, _ = inspect(tmp_path / "base", tmp_path / "tuned")
    assert not comparison.missing and {*comparison.added} == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("other", ["module.", "_orig_mod.", "_orig_mod.base."])
def test_names_with_wrappers(tmp_path, other):
    weights = {name: tensor.clone() for name, tensor in llama().state_dict().items()}
    for folder, prefix in (("plain", ""), ("other", other)):
        (tmp_path / folder).mkdir()
        save_file(
            {prefix + name: w + len(prefix) for name, w in weights.items()}, tmp_path / folder / "model.safetensors"
        )
    for earlier, later in (("plain", "other"), ("other", "plain")):
        _, comparison, _ = inspect(tmp_path / earlier, tmp_path / later)
        assert len(comparison.changes) == 21 and not comparison.missing and not comparison.added


def test_missing_added_and_reshaped_tensors(tmp_path):
    weights = {name: tensor.clone() for name, tensor in llama().state_dict().items()}
    (tmp_path / "a").mkdir()
    save_file(weights, tmp_path / "a/model.safetensors")
    weights["new.weight"] = weights.pop("lm_head.weight")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:60].clone()
    (tmp_path / "b").mkdir()
    torch.save(weights, tmp_path / "b/pytorch_model.bin")
    _, comparison, _ = inspect(tmp_path / "a", tmp_path / "b")
    assert (comparison.missing, comparison.added) == (["lm_head.weight"], ["new.weight"])
    assert comparison.reshaped == {"model.embed_tokens.weight": ((64, 32), (60, 32))}


def test_fp32_by_design(tmp_path):
    """T5 keeps `wo` in FP32, which transformers knows; a model of unknown class is judged by names."""
    config = AutoConfig.for_model("t5", d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16, vocab_size=64)
    model = AutoModel.from_config(config)
    hf_lowprec.cast_model(model)
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    model.save_pretrained(tmp_path)
    assert inspect(tmp_path).findings == []
    (tmp_path / "config.json").unlink()
    (finding,) = inspect(tmp_path).findings
    assert finding.code == "left_in_fp32" and all("wo" in name for name in finding.tensors)


def test_a_model_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    folder = tmp_path / "models--someone--model"
    llama().save_pretrained(folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (facts,), *_ = inspect("someone/model")
    assert len(facts.tensors) == 21 and facts.name == "someone/model"
    assert "cannot be fetched from the Hub" in refused("someone/other")


def test_messages(tmp_path):
    assert "there is no file or folder" in refused(tmp_path / "nothing")
    assert "no weights that can be read" in refused(tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    assert "is a folder of checkpoints; pass one of checkpoint-5" in refused(tmp_path)
    llama().save_pretrained(tmp_path / "a")
    BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path / "b")
    assert "no tensor name in common" in refused(tmp_path / "a", tmp_path / "b")
    assert "is a file; pass the folder" in refused(tmp_path / "a/config.json")
    (tmp_path / "a/trainer_state.json").write_text("[")
    assert "trainer_state.json is not readable JSON" in refused(tmp_path / "a")


def test_the_earlier_checkpoint_comes_first(tmp_path):
    trained(tmp_path, optim="adamw_bf16_sr", max_steps=4, save_strategy="steps", save_steps=2)
    assert "name the earlier checkpoint first" in refused(tmp_path / "checkpoint-4", tmp_path / "checkpoint-2")


def test_optimizer_state_that_cannot_be_read_is_a_note(tmp_path):
    llama().save_pretrained(tmp_path)
    torch.save({"state": {}, "param_groups": [{"params": [0], "lr": open_checkpoint}]}, tmp_path / "optimizer.pt")
    (facts,), _, findings = inspect(tmp_path)
    assert findings == [] and facts.states == []
    assert re.search(
        "optimizer.pt cannot be read: it names .*open_checkpoint.*only the weights are inspected", facts.unread[0]
    )


@pytest.mark.parametrize(
    ("group", "optimizer", "rounding", "decays"),
    [
        (torch.optim.AdamW, "torch.optim.Adam or torch.optim.AdamW", "nearest", True),
        (torch.optim.Adam, "torch.optim.Adam or torch.optim.AdamW", "nearest", False),
        (torch.optim.SGD, "torch.optim.SGD", "nearest", False),
        (hf_lowprec.AdamW, "hf_lowprec", "kahan", True),
    ],
)
def test_settings_of_param_groups(group, optimizer, rounding, decays):
    options = {"rounding": "kahan"} if optimizer == "hf_lowprec" else {}
    built = group([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5), weight_decay=0.1, **options)
    settings = ParamGroupSettings(built.state_dict()["param_groups"][0])
    assert (settings.optimizer, settings.rounding, settings.decoupled_decay) == (optimizer, rounding, decays)
    assert (settings.lr, settings.initial_lr, settings.weight_decay) == (0.5, 0.5, 0.1)
    assert ParamGroupSettings({"lr": 0.1}).rounding is None


def test_copies_are_as_small_as_a_chunk(tmp_path, monkeypatch):
    """Files are mapped, so what takes memory is the copies in FP32."""
    monkeypatch.setattr(tensor_facts, "CHUNK", 1 << 14)
    read = []
    original = torch.Tensor.float

    def float32(tensor, *args, **kwargs):
        read.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        tensors = {f"layers.{k}.mlp.weight": torch.randn(2**11, 2**10).to(BF16) for k in range(10)}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    monkeypatch.setattr(torch.Tensor, "float", float32)
    inspect(tmp_path / "a", tmp_path / "b")
    assert max(read) <= 1 << 14 and len(read) > 1000


def test_a_checkpoint_and_itself(tmp_path):
    """Compensations that were there before do not count as movement."""
    trained(tmp_path, optim="adamw_bf16_kahan", max_steps=2, save_strategy="steps", save_steps=2)
    _, comparison, findings = inspect(tmp_path / "checkpoint-2", tmp_path / "checkpoint-2")
    assert (comparison.steps, findings) == (0, [])


def test_models_of_two_sizes_are_not_compared(tmp_path):
    """All names are the same, and no shape is."""
    for width in (32, 64):
        config = BertConfig(
            vocab_size=2 * width, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=width, type_vocab_size=2,
        )  # fmt: skip
        BertModel(config).save_pretrained(tmp_path / str(width))
    assert "no tensor of the same shape in common" in refused(tmp_path / "32", tmp_path / "64")
