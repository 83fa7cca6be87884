"""The estimate counts the gradients that exist at once under gradient release, and the peak of a training step."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import hf_lowprec
from hf_lowprec.casting import return_float32
from hf_lowprec.integrations.checkpoint_files.input_files import InputError
from hf_lowprec.integrations.transformers.precision_report import precision_report
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.tools.estimate.activations import estimate_activations
from hf_lowprec.tools.estimate.memory import low_precision_row
from tests.support.memory_use import memory_use
from tests.support.training.peak_allocation import peak_allocation
from tests.support.training.tiny_trainer import arguments, counting_data, llama

BATCH, LENGTH, WORDS, BUCKET = 2, 16, 2048, 1 << 17
RELEASED = "gradient_release=True"
IN_8_BITS = {"state_dtype": "int8"}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", BUCKET)


def build(tied: bool, device: str = "cpu") -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, tie_word_embeddings=tied, **size))


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("tied", "optim", "options", "released"),
    [
        pytest.param(True, "adamw_bf16_split", {}, False, marks=pytest.mark.every_case),
        pytest.param(True, "adamw_bf16_split", {}, True, marks=pytest.mark.every_case),
        (True, "adamw_bf16_kahan", IN_8_BITS, False),
        pytest.param(True, "adamw_bf16_sr", IN_8_BITS, True, marks=pytest.mark.every_case),
        (False, "adamw_bf16_split", IN_8_BITS, True),
        (False, "adafactor_bf16_split", {}, False),
        (True, "adamw_bf16_sr", {"factored": True, **IN_8_BITS}, True),
        pytest.param(True, "adafactor_bf16_sr", {}, True, marks=pytest.mark.every_case),
    ],
)
def test_the_peak_of_a_training_step_is_the_estimate(tied, optim, options, released):
    """Within 1%: scalars and tables are not counted."""
    model = build(tied)
    hf_lowprec.cast_model(model)
    return_float32(model, next_to_loss=False)
    make, keywords = hf_lowprec.optimizer_factory(optim, **options)
    optimizer = make(model.parameters(), gradient_release=released, **keywords)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = memory_use(model, optimizer).total
    with torch.backends.mkldnn.flags(enabled=False):  # it takes scratch memory on some processors
        found = held + peak_allocation(step)
    empty = build(tied, "meta")
    row = low_precision_row(
        empty, optim, ",".join([*(f"{key}={value}" for key, value in options.items()), *[RELEASED] * released]) or None
    )
    row = row._replace(activations=estimate_activations(empty, BATCH, LENGTH))
    assert row.memory.total - row.memory.gradients.total() == pytest.approx(held, rel=0.01)  # gradients are not held
    assert row.peak(1, 1) == pytest.approx(found, rel=0.01)
    gradients = row.memory.gradients.total()
    everything = sum(param.nbytes for param in model.parameters())
    assert gradients < everything / 2 if released else gradients == everything


def test_the_report_says_it(tmp_path):
    args = arguments(tmp_path, optim="adamw_bf16_sr", optim_args=RELEASED, max_grad_norm=0, max_steps=1)
    trainer = Trainer(llama(), args, train_dataset=counting_data(8))
    trainer.train()
    report = hf_lowprec.cast_model(build(True))
    text = precision_report(trainer.model, trainer.optimizer.optimizer, report)
    total = sum(param.numel() for param in trainer.model.parameters())
    line, optimizer_line = (line for line in text.splitlines() if "gradients" in line)
    assert line.endswith(f"(bfloat16 {total - 160:,}, float32 160)")  # the whole model is less than a bucket
    assert optimizer_line.endswith("AdamW, backend native, gradients released during the backward pass")
    optimizer = hf_lowprec.AdamW((model := build(True)).parameters(), gradient_release=True)
    line, _ = (line for line in precision_report(model, optimizer, report).splitlines() if "gradients" in line)
    count = sum(param.numel() for param in model.parameters())
    assert line.endswith(f" at once, of {count:,}: freed during the backward pass)")


def test_accumulation_is_refused():
    with pytest.raises(InputError, match="does not accumulate gradients"):
        low_precision_row(build(True, "meta"), "adamw_bf16_kahan", RELEASED, steps=2)
