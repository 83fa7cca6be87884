"""The folders of `save_pretrained`, and of `export_checkpoint` from what was saved at the same moment."""

import copy
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
    GenerationConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import hf_lowprec
from tests.support.chosen_cases import nightly_except
from tests.support.training.counting_text import tokenizer
from tests.support.training.tiny_trainer import llama, optimizer_of, trained

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
SAVING = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}


def assert_same_folders(found: Path, expected: Path) -> None:
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in found.iterdir()} == {path.name for path in expected.iterdir()}


def assert_between_neighbours(rounded: torch.Tensor, exact: torch.Tensor) -> None:
    """In FP32: `rounded` is one of the two BF16 numbers next to `exact`, or `exact` itself where BF16 has it."""
    below = exact.view(torch.int32) & -0x10000
    above = torch.where(below == exact.view(torch.int32), below, below + 0x10000)
    bits = rounded.view(torch.int32)
    assert ((bits == below) | (bits == above)).all()


def tensors_of(trainer) -> list[torch.Tensor]:
    """Copies of all parameters and states."""
    states = [tensor for state in optimizer_of(trainer).state.values() for tensor in state.values()]
    return [tensor.detach().clone() for tensor in (*trainer.model.state_dict().values(), *states)]


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize(
    ("optim", "dtype"),
    [("adamw_bf16_kahan", "float32"), ("adamw_bf16_kahan", "bfloat16"), ("adamw_bf16_split", "float32")],
)
@pytest.mark.parametrize("name", MODELS)
def test_folders_are_those_of_transformers_with_fp32_weights(tmp_path, name, optim, dtype, size):
    """Byte for byte, from memory and from a checkpoint; in BF16, one of the two nearest. Nothing is changed."""
    trainer = trained(tmp_path, model=MODELS[name](), optim=optim, processing_class=tokenizer(), **SAVING)
    model, options = trainer.model, {"dtype": dtype, "max_shard_size": size}
    config, before = copy.deepcopy(model.config.to_dict()), tensors_of(trainer)
    hf_lowprec.save_pretrained(model, trainer.optimizer, tmp_path / "live", processing_class=tokenizer(), **options)
    assert model.config.to_dict() == config
    assert all(
        new.dtype == old.dtype and torch.equal(new, old) for new, old in zip(tensors_of(trainer), before, strict=True)
    )

    reference, exact = MODELS[name](), hf_lowprec.fp32_state_dict(model, trainer.optimizer)
    # Trainer has changed both.
    reference.config, reference.generation_config = map(copy.deepcopy, (model.config, model.generation_config))
    reference.load_state_dict(exact)
    if dtype == "bfloat16":
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "live", dtype=FP32).state_dict()
        for part, param in reference.named_parameters():
            if "norm" not in part:
                assert_between_neighbours(found[part], param.data)
                param.data = found[part].to(BF16)
    if name == "mixtral" and size == "20KB":  # transformers writes the experts of one tensor to one file
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "live", dtype=FP32).state_dict()
        assert all(torch.equal(found[key], tensor.float()) for key, tensor in reference.state_dict().items())
    else:
        reference.save_pretrained(tmp_path / "theirs", max_shard_size=size)
        tokenizer().save_pretrained(tmp_path / "theirs")
        assert_same_folders(tmp_path / "live", tmp_path / "theirs")

    report = hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out", **options)
    assert_same_folders(tmp_path / "out", tmp_path / "live")
    trainable = [*model.parameters()]
    assert report == (len(trainable), sum(param.dtype == BF16 for param in trainable), dtype, [])


def test_in_bf16_small_changes_are_kept_on_average(tmp_path):
    """Their sum is within 5 standard deviations, where rounding to nearest would lose most of it."""
    model = llama().to(BF16)
    before = {name: param.detach().float() for name, param in model.named_parameters() if param.dim() > 1}
    trainer = trained(tmp_path, model=model, optim="adamw_bf16_split", max_steps=3, learning_rate=1e-6)
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "out", dtype="bfloat16")
    exact = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=FP32).state_dict()
    began, ended, stored = (  # the numbers of BF16, counted away from zero, and parts between them
        torch.cat([values[name].view(torch.int32).flatten() for name in before]).double() / 2**16
        for values in (before, exact, found)
    )
    direction, part = (ended - began).sign(), ended - ended.floor()
    deviation = (part * (1 - part)).sum().sqrt()
    assert ((ended.round() - ended) * direction).sum() < -20 * deviation
    assert abs(((stored - ended) * direction).sum()) < 5 * deviation


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


# The second has an attribute `module`, as Lightning Fabric's wrapper.
@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.ModuleDict({"module": model})])
def test_a_wrapped_model_and_its_generation_config(tmp_path, wrap):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)
    trainer.model.generation_config = GenerationConfig(max_length=77)
    expected = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    hf_lowprec.save_pretrained(wrap(trainer.model), trainer.optimizer, tmp_path / "out")
    found = loaded_from(tmp_path / "out")
    assert found.keys() == expected.keys() and same(found, expected)
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_length == 77


def test_what_cannot_be_saved(tmp_path):
    """The configuration stays as it was."""
    model, layer = llama().to(BF16), nn.Linear(2, 2, dtype=BF16)
    quantized = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="gptq"))
    optimizer, config, content = hf_lowprec.AdamW(model.parameters()), model.config, model.config.to_dict()
    for error, message, saved, given, options in (
        (ValueError, "'float16' is not supported; use 'float32' or 'bfloat16'", model, optimizer, {"dtype": "float16"}),
        (ValueError, "none of the model's parameters", llama(), optimizer, {}),
        (ValueError, "max_shard_size|not supported", model, optimizer, {"max_shard_size": "many"}),
        (TypeError, "`optimizer` is a SimpleNamespace, not an optimizer$", model, SimpleNamespace(), {}),
        (TypeError, "`optimizer` is a MagicMock, not an optimizer$", model, MagicMock(), {}),
        (TypeError, "Linear is neither .* PEFT model; save the tensors of fp32_st", layer, optimizer, {}),
        (ValueError, r"quantized \(gptq\).*train adapters on it", model, optimizer, {"quantizer": quantized}),
    ):
        model.hf_quantizer = options.pop("quantizer", None)
        with pytest.raises(error, match=message):
            hf_lowprec.save_pretrained(saved, given, tmp_path / "out", **options)
    with pytest.raises(TypeError, match=r"`optimizer` is a NoneType, not an optimizer$"):
        hf_lowprec.keep_low_bits(None)
    assert model.config is config and config.to_dict() == content
    assert not [*tmp_path.glob("out/*.safetensors")]


def test_an_optimizer_that_does_not_train_all_weights_is_named(tmp_path):
    model = llama().to(BF16)
    optimizer = hf_lowprec.AdamW([*model.parameters()][1:])
    with pytest.warns(RuntimeWarning, match=r"model.embed_tokens.weight: their stored 16-bit values") as caught:
        hf_lowprec.save_pretrained(model, optimizer, tmp_path)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("method", nightly_except({"dora", "saved_both", "prompt"}, METHODS))
def test_adapters_load_as_fp32(tmp_path, method):
    """From a folder of `save_pretrained`, and from the same folder of an exported checkpoint."""
    peft = pytest.importorskip("peft")
    from tests.support.models import tiny_models
    from tests.support.training.peft_adapters import TIED, adapted

    trainer = trained(tmp_path, model=adapted(method), optim="adamw_bf16_kahan", **SAVING)
    model, before = trainer.model, tensors_of(trainer)
    hf_lowprec.save_pretrained(model, trainer.optimizer, tmp_path / "live")
    assert all(torch.equal(new, old) for new, old in zip(tensors_of(trainer), before, strict=True))
    base, _ = tiny_models.llama(tied=method in TIED)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "live")
    expected = hf_lowprec.fp32_state_dict(model, trainer.optimizer)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name in params:
        found = loaded.get_parameter(name)
        assert found.dtype == FP32 and torch.equal(found, expected[name]), name
    assert any(not torch.equal(expected[name], param.float()) for name, param in params.items())
    assert hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out").refined > 0
    assert_same_folders(tmp_path / "out", tmp_path / "live")


def test_prompts_are_computed_from_the_fp32_encoder(tmp_path):
    """Which a checkpoint does not have, so that exporting it is refused."""
    pytest.importorskip("peft")
    from tests.support.training.peft_adapters import adapted

    trainer = trained(tmp_path, model=adapted("p_tuning"), optim="adamw_bf16_kahan", **SAVING)
    reference, before = adapted("p_tuning"), tensors_of(trainer)
    reference.load_state_dict(hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer))
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "live")
    assert all(torch.equal(new, old) for new, old in zip(tensors_of(trainer), before, strict=True))
    found = load_file(tmp_path / "live/adapter_model.safetensors")["prompt_embeddings"]
    assert torch.equal(found, reference.get_prompt_embedding_to_save("default"))
    with pytest.raises(ValueError, match=r"for prompt_encoder\.default.*; call hf_lowprec\.save_pretrained\(model"):
        hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out")


def test_adapters_that_transformers_added_itself(tmp_path):
    peft = pytest.importorskip("peft")
    model = llama()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = trained(tmp_path, model=model, optim="adamw_bf16_kahan", **SAVING)
    expected = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "live")
    hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out")
    for folder in ("live", "out"):
        loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / folder)
        found = {name: param for name, param in loaded.named_parameters() if "lora_" in name}
        assert len(found) == 8
        for name, param in found.items():
            assert torch.equal(param, expected[name.removeprefix("base_model.model.")]), name


def test_two_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    from tests.support.models import tiny_models
    from tests.support.training.peft_adapters import METHODS, adapted

    model = adapted("lora")
    model.add_adapter("second", METHODS["rslora"])
    model.set_adapter("second")
    trainer = trained(tmp_path, model=model, optim="adamw_bf16_kahan", **SAVING)
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "live")
    assert hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out").refined == 8
    for part in ("adapter_model.safetensors", "second/adapter_model.safetensors"):
        assert (tmp_path / "out" / part).read_bytes() == (tmp_path / "live" / part).read_bytes()
    loaded = peft.PeftModel.from_pretrained(tiny_models.llama()[0], tmp_path / "out/second")
    assert any("lora_A" in name for name, _ in loaded.named_parameters())
