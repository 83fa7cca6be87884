"""What other tools see in a model that was trained in BF16 and saved: weights in BF16, norms in FP32."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer

import hf_lowprec
from tests.support.training.counting_text import tokenizer
from tests.support.training.tiny_trainer import arguments, counting_data, llama

BF16, FP32 = torch.bfloat16, torch.float32
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
