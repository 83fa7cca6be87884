"""Adapters on quantized bases (QLoRA): what is stored how, learning as in FP32 on the same base, and what is refused.

The stand-ins of `tests/support/models/quantized_models.py` need no package; the real quantizers run where they are
installed.
"""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.distributed import DistributedConfig

import hf_lowprec
from hf_lowprec.casting.quantized import acts_as_fp32, is_quantized
from tests.support.chosen_cases import nightly_except
from tests.support.models import tiny_models
from tests.support.models.quantized_models import (
    Int8Linear,
    Int8Weight,
    StoredLinear,
    quantize_linears,
    subclassed,
)
from tests.support.training.tiny_trainer import arguments, counting_data, losses, optimizer_of, trained

peft = pytest.importorskip("peft")

from tests.support.training.peft_adapters import METHODS, moved, trainable  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
FORMS = {"buffers": Int8Linear, "parameter_subclass": StoredLinear, "wrapper_subclass": subclassed}


def quantized(form: str, base: torch.dtype = FP32, adapters: bool = True) -> nn.Module:
    model, _ = tiny_models.llama()
    quantize_linears(model.to(base), FORMS[form])
    torch.manual_seed(0)
    return peft.get_peft_model(model, METHODS["all_linear"]) if adapters else model


def refused(tmp_path, model, message: str, **settings) -> None:
    """The Trainer must not be built, and the model must be as it was."""
    before = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        Trainer(model, arguments(tmp_path, optim="adamw_bf16_kahan", **settings), train_dataset=counting_data())
    assert {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("form", nightly_except({"parameter_subclass", "wrapper_subclass"}, FORMS))
def test_adapters_learn_as_in_fp32_on_the_same_base(tmp_path, capsys, form):
    """See `test_peft`; the report counts codes and scales as they are stored."""
    start = trainable(quantized(form))
    way = moved(trained(tmp_path, model=quantized(form), optim="adamw_torch").model, start)
    capsys.readouterr()
    trainer = trained(tmp_path, model=quantized(form), optim="adamw_bf16_kahan")
    ours = moved(trainer.model, start)
    assert 0.95 < (ours @ way) / (way @ way) < 1.05
    report = capsys.readouterr().out
    rows = dict(re.findall(r"^  (trainable|frozen|gradients|exp_avg|compensation) .*\((.*)\)$", report, re.MULTILINE))
    codes = 14 // 7 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)  # q, o; k, v; gate, up, down of two layers
    scales, embeddings, norms = 14 // 7 * (2 * 32 + 2 * 16 + 64 + 64 + 32), 2 * 96 * 32, 5 * 32
    stored = f"float32 {codes // 4 + scales + norms:,}" if form == "parameter_subclass" else f"int8 {codes:,}"
    assert stored in rows["frozen"] and f"bfloat16 {embeddings:,}" in rows["frozen"]
    if form != "parameter_subclass":
        assert f"float32 {scales + norms:,}" in rows["frozen"]
    assert rows["trainable"] == rows["gradients"] == rows["exp_avg"] == rows["compensation"] == f"bfloat16 {len(way):,}"


def test_the_report_of_a_model_that_trains_as_a_whole_names_weights(tmp_path, capsys):
    trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)
    report = capsys.readouterr().out
    assert "  weights " in report and "trainable" not in report and "frozen" not in report


class TestRefusals:
    @pytest.mark.parametrize("form", FORMS)
    def test_all_weights_of_a_quantized_model(self, tmp_path, form):
        model = quantized(form, adapters=False)
        for name, param in model.named_parameters():
            param.requires_grad_("proj" not in name)
        refused(tmp_path, model, r"whole model is trainable.*q_proj.*peft\.get_peft_model.*without quantization_config")

    @pytest.mark.parametrize(
        ("aware", "what"), [(False, "training all weights"), (True, "quantization-aware training")]
    )
    def test_quantization_config_without_adapters(self, tmp_path, aware, what):
        model, _ = tiny_models.llama()
        model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)
        model.is_quantized = True
        model.hf_quantizer = SimpleNamespace(is_trainable=True, is_qat_trainable=aware)
        refused(tmp_path, model, rf"{what} of a model with quantization_config=BitsAndBytesConfig .*get_peft_model")

    def test_quantized_weights_that_require_gradients(self, tmp_path):
        model = quantized("wrapper_subclass")
        name, param = next((n, p) for n, p in model.named_parameters() if isinstance(p, Int8Weight))
        param.requires_grad_(True)
        refused(tmp_path, model, rf"{re.escape(name)} is quantized \(Int8Weight of torch.float32\) and requires")
        with pytest.raises(ValueError, match=r"is quantized \(Int8Weight of torch.float32\).*freeze it"):
            hf_lowprec.AdamW(model.parameters())

    def test_a_tensor_parallel_model_is_not_called_quantized(self, tmp_path, two_fake_ranks):
        """Its parameters are DTensors, as those that FSDP2 shards, which may be of quantized numbers all the same."""
        tiny_models.llama()[0].save_pretrained(tmp_path)
        if "tp_plan" not in inspect.signature(DistributedConfig).parameters:
            pytest.skip(f"transformers {transformers.__version__} has no tensor parallelism of this form")
        parallel = DistributedConfig(tp_plan="auto", tp_size=2)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=parallel)
        weight = model.model.layers[0].mlp.up_proj.weight.detach()
        assert isinstance(weight, DTensor)
        assert not any(acts_as_fp32(param) for param in model.parameters())
        assert [is_quantized(weight), is_quantized(weight.to(torch.int8))] == [False, True]

    def test_what_is_frozen_on_purpose_is_not_refused(self, tmp_path):
        model = quantized("buffers", adapters=False)
        for name, param in model.named_parameters():
            param.requires_grad_("norm" in name)
        trainer = trained(tmp_path, model=model, optim="adamw_bf16_sr", max_steps=2)
        assert {p.dtype for p in optimizer_of(trainer).state} == {FP32}


def wide_llama(folder) -> None:
    """Quantizers want rows of 64 or 128."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        use_cache=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def bitsandbytes(**settings):
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**settings)


def torchao(name: str):
    return transformers.TorchAoConfig(getattr(pytest.importorskip("torchao.quantization"), name)())


def quanto():
    pytest.importorskip("optimum.quanto")
    return transformers.QuantoConfig(weights="int8")


PACKAGES = {
    "bnb4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BF16),
    "bnb4_stored_as_fp32": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_storage=FP32),
    "bnb8": lambda: bitsandbytes(load_in_8bit=True),
    "torchao_int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao_float8": lambda: torchao("Float8WeightOnlyConfig"),
    "quanto8": quanto,
}


@pytest.mark.parametrize("base", [FP32, BF16])
@pytest.mark.parametrize("package", PACKAGES)
def test_real_quantizers(tmp_path, package, base):
    """The cast changes no output by more than BF16 activations do, so no weight; adapters train.

    bitsandbytes' 8 bits are those of activations too: in steps of 1/127 of the largest, some go to the other side.
    """
    settings = PACKAGES[package]()
    wide_llama(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=base, quantization_config=settings, device_map="cpu"
    )
    model = peft.get_peft_model(model, METHODS["all_linear"])
    rows = {"input_ids": torch.arange(24).view(2, 12)}
    with torch.no_grad():
        expected = model(**rows).logits.float()
        trainer = Trainer(model, arguments(tmp_path, optim="adamw_bf16_kahan"), train_dataset=counting_data())
        logits = model(**rows).logits.float()
    noise = 10**0.5 * 2**-9 + (1 / 127 if package == "bnb8" else 0)
    assert (logits - expected).norm() < noise * expected.norm()
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.3
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {BF16}
