"""What other tools see in a model that was trained in BF16 and saved: weights in BF16, norms in FP32."""

import json

import peft
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Trainer, pipeline

import hf_lowprec
from tests.support.training.counting_text import WORDS, tokenizer
from tests.support.training.tiny_trainer import arguments, counting_data, llama

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 60  # then the model counts: its loss is 0.06
PROMPT = torch.arange(5)[None]
GOES_ON = list(range(11))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[LlamaForCausalLM, str]:
    """The trained model, and the folder it was saved to."""
    folder = tmp_path_factory.mktemp("saved")
    args = arguments(folder / "run", optim="adamw_bf16_kahan", max_steps=STEPS)
    trainer = Trainer(llama(), args, train_dataset=counting_data(), processing_class=tokenizer())
    trainer.train()
    trainer.save_model(folder / "final")
    norm = trainer.model.model.norm.weight.detach()
    assert not torch.equal(norm, norm.bfloat16().float()), "norms have learnt digits that BF16 does not have"
    return trainer.model.eval(), str(folder / "final")


def load(folder: str, **options) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def generated(model: nn.Module) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=6, do_sample=False)[0].tolist()


def test_a_plain_reader_finds_every_tensor_in_its_own_dtype(saved):
    model, folder = saved
    with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == (FP32 if "norm" in name else BF16), name
        assert torch.equal(tensor, expected[name]), name
    with open(f"{folder}/config.json") as file:
        assert json.load(file)["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, BF16),
        ({"dtype": "auto"}, BF16),
        ({"dtype": BF16}, BF16),
        ({"dtype": "float32"}, FP32),
        ({"dtype": FP16}, FP16),
        # transformers 5 no longer loads modules in dtypes of their own.
        ({"dtype": {"": BF16, "model": FP32}}, BF16),
    ],
    ids=str,
)
def test_from_pretrained_loads_one_dtype(saved, options, dtype):
    """The norms are rounded to it, once, and the model counts in each."""
    model, folder = saved
    loaded = load(folder, **options)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.to(dtype)), name
        assert loaded.get_parameter(name).dtype == dtype, name
    assert generated(loaded) == generated(model) == GOES_ON


def test_norms_in_fp32_for_inference(saved):
    """Loaded in FP32 and cast, the model computes bit for bit what it did when training ended."""
    model, folder = saved
    loaded = load(folder, dtype="float32")
    hf_lowprec.cast_model(loaded)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
        assert loaded.get_parameter(name).dtype == parameter.dtype, name
    with torch.no_grad():
        assert torch.equal(loaded(PROMPT).logits.float(), model(PROMPT).logits.float())
        assert not torch.equal(load(folder)(PROMPT).logits.float(), model(PROMPT).logits.float())
    assert generated(loaded) == GOES_ON


class KeepsItsNorms(LlamaForCausalLM):
    _keep_in_fp32_modules_strict = ("norm",)


class KeepsItsNormsInFP16(LlamaForCausalLM):
    _keep_in_fp32_modules = ("norm",)


@pytest.mark.parametrize(
    ("cls", "dtype", "norms"),
    [
        (KeepsItsNorms, BF16, FP32),
        (KeepsItsNorms, FP16, FP32),
        (KeepsItsNormsInFP16, BF16, BF16),
        (KeepsItsNormsInFP16, FP16, FP32),
    ],
)
def test_what_a_model_class_keeps_in_fp32(saved, cls, dtype, norms):
    """Its `_keep_in_fp32_modules` matters in FP16 only. FP32 norms alone do not make a Llama run: it needs the cast."""
    model, folder = saved
    loaded = cls.from_pretrained(folder, dtype=dtype).eval()
    for name, parameter in loaded.named_parameters():
        expected = norms if "norm" in name else dtype
        assert parameter.dtype == expected, name
        assert torch.equal(parameter, model.get_parameter(name).to(expected)), name
    if norms == FP32:
        with pytest.raises(RuntimeError, match="same dtype"):
            loaded(PROMPT)
        hf_lowprec.cast_model(loaded, dtype)
    assert generated(loaded) == GOES_ON


def test_a_pipeline_takes_the_folder(saved):
    _, folder = saved
    generate = pipeline("text-generation", model=folder)
    assert {parameter.dtype for parameter in generate.model.parameters()} == {BF16}
    (answer,) = generate(" ".join(WORDS[:4]), max_new_tokens=5, do_sample=False)
    assert answer["generated_text"].replace("w", " w").split() == WORDS[:9], "this tokenizer adds no spaces"
    assert AutoTokenizer.from_pretrained(folder)("w0 w1")["input_ids"][-2:] == [4, 5]


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_peft_merges_an_adapter_into_the_saved_model(saved, tmp_path, dtype):
    """Trained on the cast model, saved, loaded onto the folder in one dtype, merged and saved again."""
    model, folder = saved
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights="gaussian")
    adapted = peft.get_peft_model(load(folder, dtype="float32"), config)
    args = arguments(tmp_path, optim="adamw_bf16_kahan", max_steps=4)
    trainer = Trainer(adapted, args, train_dataset=counting_data())
    trainer.train()
    trainer.save_model(tmp_path / "adapter")

    merged = peft.PeftModel.from_pretrained(load(folder, dtype=dtype), tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    found = load(str(tmp_path / "merged"))
    for name, parameter in model.named_parameters():
        weight = parameter.detach().double()
        if "q_proj" in name:
            layer = adapted.get_submodule(f"base_model.model.{name.removesuffix('.weight')}")
            low, high = (lora["default"].weight.detach().double() for lora in (layer.lora_A, layer.lora_B))
            assert high.abs().max() > 0, "the adapter has learnt"
            delta = layer.scaling["default"] * high @ low
            # At most 7 roundings by half a spacing: 4 in sums of 4 terms, the scaling, the product's dtype, the sum.
            half_spacing = {BF16: 2**-9, FP32: 2**-24}[dtype]
            bound = 7 * half_spacing * (weight.abs() + layer.scaling["default"] * high.abs() @ low.abs())
            assert delta.abs().gt(bound).any(), "a merge that adds nothing would be noticed"
            assert (found.get_parameter(name).double() - (weight + delta)).abs().le(bound).all(), name
        else:
            assert torch.equal(found.get_parameter(name), parameter.to(dtype)), name
    assert {parameter.dtype for parameter in found.parameters()} == {dtype}
    assert generated(found) == GOES_ON
