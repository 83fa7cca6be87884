"""`save_pretrained`: what `from_pretrained` loads from its folders, without arguments."""

import copy
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import hf_lowprec
from hf_lowprec.rounding.attached_low_bits import attach_rounded_off
from tests.support.chosen_cases import nightly_except
from tests.support.rounding.kept_low_bits import kept_values
from tests.support.training.counting_text import tokenizer
from tests.support.training.tiny_trainer import LENGTH, llama, optimizer_of, trained

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def tied() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(type(llama().config)(**SIZES, tie_word_embeddings=True))


def mixtral() -> MixtralForCausalLM:
    """Its experts are one tensor in memory and three tensors per expert in files."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


METHODS = ("dora", "saved_both", "embedding", "tokens", "ia3", "prompt", "prefix")
MODELS = {"llama": llama, "tied": tied, "mixtral": mixtral}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(LENGTH)[None]).logits


def assert_loads(folder, expected: dict[str, torch.Tensor], fresh: nn.Module) -> None:
    """Assert that `from_pretrained` gives the expected FP32 weights, and the logits of a model with those weights."""
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == FP32 and torch.equal(found[name], tensor), name
    fresh.load_state_dict(expected)
    assert torch.equal(logits(loaded), logits(fresh))


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("optim", "size"), [("adamw_bf16_kahan", "5GB"), ("adamw_bf16_kahan", "20KB"), ("adamw_bf16_split", "5GB")]
)
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_the_fp32_estimates(tmp_path, name, optim, size):
    trainer = trained(tmp_path, model=MODELS[name](), optim=optim, max_steps=3)
    model, expected = trainer.model, hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    config = copy.deepcopy(model.config.to_dict())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hf_lowprec.save_pretrained(model, trainer.optimizer, tmp_path / "out", max_shard_size=size)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (size == "20KB")
    assert_loads(tmp_path / "out", expected, MODELS[name]())
    assert model.config.to_dict() == config
    assert all(tensor.dtype == before[key].dtype for key, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


# Of the experts of one tensor, transformers does not write some to one file and some to the next; we do.
@pytest.mark.parametrize(("name", "size"), [("llama", "20KB"), ("tied", "20KB"), ("mixtral", "5GB")])
def test_files_are_those_of_transformers(tmp_path, name, size):
    trainer = trained(tmp_path, model=MODELS[name](), optim="adamw_bf16_kahan", max_steps=1)
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "ours", max_shard_size=size)
    reference = MODELS[name]()
    reference.config.use_cache = trainer.model.config.use_cache  # Trainer turns it off
    reference.load_state_dict(hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer))
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    for path in sorted((tmp_path / "theirs").iterdir()):
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes(), path.name
    assert len([*(tmp_path / "ours").iterdir()]) == len([*(tmp_path / "theirs").iterdir()])


def test_before_the_first_step_the_weights_are_those_that_were_cast(tmp_path):
    """To the last bit, except where the low bits of a tie lack one unit of the last place."""
    model = llama()
    exact = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(BF16)
    for name, param in model.named_parameters():
        attach_rounded_off(param, exact[name])
    optimizer = hf_lowprec.AdamW(model.parameters(), rounding="kahan")
    hf_lowprec.save_pretrained(model, optimizer, tmp_path)
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, exact[name] if "norm" in name else kept_values(exact[name])), name
        assert not torch.equal(tensor, tensor.to(BF16).float()) or "norm" in name


def test_bfloat16_rounds_once_and_leaves_norms(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=3)
    expected = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "out", dtype="bfloat16")
    trainer.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == BF16
    found, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "saved"))
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in theirs.items()}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name] if "norm" in name else expected[name].to(BF16)), name


CHANGES_FILES = {"open", "write", "close", "__exit__", "replace", "rename", "remove", "unlink", "serialize_file"}
"""Names of C functions; `serialize_file` is that of safetensors."""


@contextmanager
def copied_whenever_it_changes(folder: Path, copies: Path) -> Iterator[None]:
    """Copy `folder` to folders in `copies` at every moment inside: what a process that is killed there leaves."""
    last: list = []

    def look(frame, event, called) -> None:
        if event != "c_return" or called.__name__ not in CHANGES_FILES:
            return
        stats = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
        state = [(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        if state != last:
            last[:] = state
            shutil.copytree(folder, copies / str(len([*copies.iterdir()])))

    copies.mkdir()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def loaded_from(folder: Path) -> dict[str, torch.Tensor] | None:
    """The weights that `from_pretrained` loads without arguments; None if it raises or lacks some."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except Exception:  # whatever transformers raises
        return None
    # Copies: what is loaded may be the file itself, mapped into memory.
    return None if info["missing_keys"] else {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.combinations(1)
@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("kind", ["new", "over another model", "export"])
def test_a_kill_at_any_moment_leaves_a_whole_model_or_none(tmp_path, kind, size):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=2, save_strategy="steps", save_steps=2)
    out, models = tmp_path / "out", []
    if kind == "over another model":
        llama().to(BF16).save_pretrained(out, max_shard_size=size)
        models.append(loaded_from(out))
    with copied_whenever_it_changes(out, tmp_path / "copies"):
        if kind == "export":
            hf_lowprec.export_checkpoint(tmp_path / "checkpoint-2", out, dtype="bfloat16", max_shard_size=size)
        else:
            hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, out, max_shard_size=size)
    models.append(loaded_from(out))
    left = sorted((tmp_path / "copies").iterdir())
    for folder in left:
        found = loaded_from(folder)
        assert found is None or any(same(found, model) for model in models), sorted(map(str, folder.iterdir()))
    assert len(left) >= 4


def test_tokenizer_and_generation_config_come_along(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)
    trainer.model.generation_config = GenerationConfig(max_length=77)
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "out", processing_class=tokenizer())
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_length == 77
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w1 w2")["input_ids"] == tokenizer()("w1 w2")["input_ids"]


# The second has an attribute `module`, as Lightning Fabric's wrapper.
@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.ModuleDict({"module": model})])
def test_a_wrapped_model(tmp_path, wrap):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)
    expected = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    hf_lowprec.save_pretrained(wrap(trainer.model), trainer.optimizer, tmp_path / "out")
    assert_loads(tmp_path / "out", expected, llama())


def test_what_cannot_be_saved(tmp_path):
    model = llama().to(BF16)
    optimizer = hf_lowprec.AdamW(model.parameters())
    with pytest.raises(ValueError, match="dtype='float16' is not supported; use 'float32' or 'bfloat16'"):
        hf_lowprec.save_pretrained(model, optimizer, tmp_path / "out", dtype="float16")
    with pytest.raises(ValueError, match="none of the model's parameters"):
        hf_lowprec.save_pretrained(llama(), optimizer, tmp_path / "out")
    for given, message in (
        (SimpleNamespace(), "`optimizer` is a SimpleNamespace, not an optimizer$"),
        (None, "`optimizer` is a NoneType, not an optimizer$"),
        (MagicMock(), "`optimizer` is a MagicMock, not an optimizer$"),
    ):
        with pytest.raises(TypeError, match=message):
            hf_lowprec.save_pretrained(model, given, tmp_path / "out")
        with pytest.raises(TypeError, match=message):
            hf_lowprec.keep_low_bits(given)
    layer = nn.Linear(2, 2, dtype=BF16)
    with pytest.raises(
        TypeError, match="Linear is neither a transformers nor a PEFT model; save the tensors of fp32_st"
    ):
        hf_lowprec.save_pretrained(layer, hf_lowprec.AdamW(layer.parameters()), tmp_path / "out")
    model.hf_quantizer = type("Quantizer", (), {"quantization_config": type("Config", (), {"quant_method": "gptq"})})
    with pytest.raises(ValueError, match=r"quantized \(gptq\).*train adapters on it"):
        hf_lowprec.save_pretrained(model, optimizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_optimizer_that_does_not_train_all_weights_is_named(tmp_path):
    model = llama().to(BF16)
    optimizer = hf_lowprec.AdamW([*model.parameters()][1:])
    with pytest.warns(RuntimeWarning, match=r"model.embed_tokens.weight: their stored 16-bit values") as caught:
        hf_lowprec.save_pretrained(model, optimizer, tmp_path)
    assert caught[0].filename == __file__


def test_the_config_is_restored_if_saving_fails(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)
    config = trainer.model.config
    with pytest.raises(ValueError, match=r"max_shard_size|not supported"):
        hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "out", max_shard_size="many")
    assert trainer.model.config is config and config.dtype != "float32"


def test_an_optimizer_before_and_after_saving_trains_the_same(tmp_path):
    """The states are read, not touched: a run that saved midway ends with the bits of one that did not."""
    runs = []
    for saves in (False, True):
        model = llama().to(BF16)
        optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3, rounding="kahan")
        for step in range(4):
            model(torch.arange(LENGTH)[None], labels=torch.arange(LENGTH)[None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if saves and step == 1:
                hf_lowprec.save_pretrained(model, optimizer, tmp_path)
        runs.append([*model.parameters(), *(state["compensation"] for state in optimizer.state.values())])
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


class TestAdapters:
    """PEFT models: the folder holds the adapters."""

    @pytest.mark.parametrize("method", nightly_except({"dora", "saved_both", "prompt"}, METHODS))
    def test_they_load_as_fp32(self, tmp_path, method):
        peft = pytest.importorskip("peft")
        from tests.support.models import tiny_models
        from tests.support.training.peft_adapters import TIED, adapted

        trainer = trained(tmp_path, model=adapted(method), optim="adamw_bf16_kahan", max_steps=3)
        model, expected = trainer.model, hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        hf_lowprec.save_pretrained(model, trainer.optimizer, tmp_path / "out")
        assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
        base, _ = tiny_models.llama(tied=method in TIED)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out")
        trained_names = [name for name, param in model.named_parameters() if param.requires_grad]
        trainable = {name: loaded.get_parameter(name) for name in trained_names}
        for name, param in trainable.items():
            assert param.dtype == FP32 and torch.equal(param, expected[name]), name
        changed = [name for name in trainable if not torch.equal(expected[name], before[name].float())]
        assert changed  # the compensation matters

    def test_prompts_are_computed_from_the_fp32_encoder(self, tmp_path):
        pytest.importorskip("peft")
        from tests.support.training.peft_adapters import adapted

        trainer = trained(tmp_path, model=adapted("p_tuning"), optim="adamw_bf16_kahan", max_steps=3)
        reference = adapted("p_tuning")
        reference.load_state_dict(hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer))
        hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "out")
        found = load_file(tmp_path / "out/adapter_model.safetensors")["prompt_embeddings"]
        assert torch.equal(found, reference.get_prompt_embedding_to_save("default"))

    def test_adapters_that_transformers_added_itself(self, tmp_path):
        peft = pytest.importorskip("peft")
        model = llama()
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        trainer = trained(tmp_path, model=model, optim="adamw_bf16_kahan", max_steps=3)
        expected = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
        hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "out")
        loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "out")
        found = {name: param for name, param in loaded.named_parameters() if "lora_" in name}
        assert found
        for name, param in found.items():
            assert torch.equal(param, expected[name.removeprefix("base_model.model.")]), name


def test_a_mixed_optimizer_state_is_read_per_group(tmp_path):
    """Only the groups with Kahan summation have compensations."""
    model = llama().to(BF16)
    params = [*model.parameters()]
    groups = [{"params": params[:5], "rounding": "stochastic"}, {"params": params[5:], "rounding": "kahan"}]
    optimizer = hf_lowprec.AdamW(groups, lr=1e-3)
    model(torch.arange(LENGTH)[None], labels=torch.arange(LENGTH)[None]).loss.backward()
    optimizer.step()
    hf_lowprec.save_pretrained(model, optimizer, tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    for k, (param, saved) in enumerate(zip(params, found.parameters(), strict=True)):
        assert torch.equal(saved, param.float()) == (k < 5)
    assert optimizer_of(type("Holder", (), {"optimizer": optimizer})) is optimizer
