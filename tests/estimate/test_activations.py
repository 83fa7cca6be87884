"""Activations as estimated on the meta device are those of real training steps of Trainer."""

from collections import defaultdict

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    ViTConfig,
    ViTForImageClassification,
)

from hf_lowprec.casting import cast_model, return_float32
from hf_lowprec.integrations.checkpoint_files.input_files import InputError
from hf_lowprec.tools.estimate.activations import CHUNK, estimate_activations
from tests.support.training.counting_text import tokenizer
from tests.support.training.peak_allocation import peak_allocation
from tests.support.training.tiny_trainer import arguments

BATCH, LENGTH, WORDS = 4, 96, 500
SIZES = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=2)),
    "gpt2": (
        GPT2LMHeadModel,
        lambda: GPT2Config(
            vocab_size=WORDS,
            **{"n_embd": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        ),
    ),
    "mixtral": (
        MixtralForCausalLM,
        lambda: MixtralConfig(**SIZES, intermediate_size=256, num_local_experts=4, num_key_value_heads=2),
    ),
    "bert": (BertForMaskedLM, lambda: BertConfig(**SIZES, **NO_DROPOUT, intermediate_size=128)),
    "t5": (
        T5ForConditionalGeneration,
        lambda: T5Config(
            vocab_size=WORDS,
            **{"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
            decoder_start_token_id=0,
        ),
    ),
}


def build(name: str, attention: str, device: str):
    cls, config = MODELS[name]
    made = config()
    made._attn_implementation = attention
    with torch.device(device):
        return cls(made)


class Measured:
    """A Trainer, which notes the peak of each forward and backward, beyond what was there before."""

    def training_step(self, *args, **kwargs):
        losses = []
        self.peaks = [*getattr(self, "peaks", []), peak_allocation(lambda: losses.append(self.step(*args, **kwargs)))]
        return losses[0]

    def step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class MeasuredTrainer(Measured, Trainer):
    pass


def measured(tmp_path, model, optim: str, **settings) -> int:
    tokens = torch.randint(5, WORDS, (2 * BATCH, LENGTH))
    settings = {"optim": optim, "max_steps": 2, "per_device_train_batch_size": BATCH, **settings}
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = MeasuredTrainer(model, arguments(tmp_path, **settings), train_dataset=data)
    trainer.train()
    return trainer.peaks[1]


CASES = [
    ("llama", "sdpa", "adamw_bf16_kahan", False),
    ("llama", "eager", "adamw_torch", True),
    ("gpt2", "sdpa", "adamw_torch", False),
    ("gpt2", "eager", "adamw_bf16_kahan", True),
    ("mixtral", "sdpa", "adamw_bf16_kahan", False),
    pytest.param("bert", "sdpa", "adamw_bf16_kahan", True, marks=pytest.mark.every_case),
    ("bert", "eager", "adamw_torch", False),
    # sdpa: a CPU has no fused kernel for a position bias with gradients
    pytest.param("t5", "eager", "adamw_bf16_kahan", False, marks=pytest.mark.every_case),
]


@pytest.mark.combinations(1)
@pytest.mark.parametrize(("name", "attention", "optim", "checkpointing"), CASES)
def test_activations_are_those_of_training(tmp_path, name, attention, optim, checkpointing):
    """Within 10%: Trainer's own tensors, such as losses, and scratch memory of kernels are not counted."""
    model = build(name, attention, "meta")
    if optim != "adamw_torch":
        cast_model(model)
        return_float32(model, next_to_loss=False)
    expected = estimate_activations(model, BATCH, LENGTH, checkpointing)
    real = build(name, attention, "cpu")
    found = measured(tmp_path, real, optim, gradient_checkpointing=checkpointing)
    assert expected.with_gradients == pytest.approx(found, rel=0.1)


def test_gradients_that_exist_already_are_not_activations(tmp_path):
    """With gradient accumulation, the second micro-batch adds its gradients to those of the first, one by one."""
    settings = {"gradient_accumulation_steps": 2, "max_steps": 1}
    found = measured(tmp_path, build("llama", "eager", "cpu"), "adamw_torch", **settings)
    assert estimate_activations(build("llama", "eager", "meta"), BATCH, LENGTH).peak == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("optim", ["adamw_bf16_split", pytest.param("adamw_torch", marks=pytest.mark.every_case)])
def test_a_chunked_loss_is_that_of_trl(tmp_path, monkeypatch, optim):
    """But for less than 16 FP32 numbers per token, where a hidden state takes 64 numbers of 2 or 4 bytes.

    TRL's kernels, which allocate nothing on GPUs, do nothing here.
    """
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    import datasets
    from trl import SFTConfig, SFTTrainer
    from trl.trainer import utils

    class MeasuredSFT(Measured, SFTTrainer):
        pass

    assert (kernels.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE) == CHUNK
    for module in (kernels, utils):
        monkeypatch.setattr(module, "_use_triton", lambda device: True)
    for name in ("_forward_kernel", "_backward_kernel"):
        monkeypatch.setattr(kernels, name, defaultdict(lambda: lambda *args, **options: None))
    monkeypatch.setattr(kernels, "_addmm_fp32", lambda *tensors: None)
    tokens = torch.randint(5, WORDS, (2 * BATCH, LENGTH)).tolist()
    settings = {"optim": optim, "max_steps": 2, "per_device_train_batch_size": BATCH, "bf16": False}
    trainer = MeasuredSFT(
        build("llama", "sdpa", "cpu"),
        arguments(tmp_path, SFTConfig, gradient_checkpointing=True, **settings),
        train_dataset=datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens]),
        processing_class=tokenizer(),
    )
    trainer.train()
    model = build("llama", "sdpa", "meta")
    if optim != "adamw_torch":
        cast_model(model)
        return_float32(model, next_to_loss=False)
    expected = estimate_activations(model, BATCH, LENGTH, gradient_checkpointing=True, chunked_loss=True)
    assert 0 <= trainer.peaks[1] - expected.with_gradients < 16 * 4 * BATCH * LENGTH


def test_fused_attention_does_not_grow_with_the_square_of_the_length():
    def growth(attention: str) -> float:
        short, long = (estimate_activations(build("bert", attention, "meta"), 1, length).peak for length in (64, 256))
        return long / short

    assert growth("sdpa") <= 4 < 5 < growth("eager")


def test_what_cannot_be_estimated_is_said():
    with torch.device("meta"):
        images = ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
        headless = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128)).model
    with pytest.raises(InputError, match="takes pixel_values, of which the size is not known"):
        estimate_activations(images, 1, 8)
    with pytest.raises(InputError, match="the labels of LlamaModel are not known"):
        estimate_activations(headless, 1, 8)
    with pytest.raises(InputError, match="BertForMaskedLM is not a causal language model"):
        estimate_activations(build("bert", "sdpa", "meta"), 1, 8, chunked_loss=True)
    with pytest.raises(InputError, match="does not run on tensors without values"):
        estimate_activations(build("bert", "eager", "meta"), 1, 1000)  # more tokens than positions


def test_routed_experts_in_fp32_are_counted_or_refused(tmp_path):
    """Their grouped products of matrices take only BF16 on the meta device in torch 2.13, and FP32 as well in 2.15."""
    model = build("mixtral", "sdpa", "meta")
    try:
        expected = estimate_activations(model, BATCH, LENGTH)
    except InputError as error:
        assert "MixtralForCausalLM does not run on tensors without values" in str(error)
    else:
        found = measured(tmp_path, build("mixtral", "sdpa", "cpu"), "adamw_torch")
        assert expected.with_gradients == pytest.approx(found, rel=0.1)
