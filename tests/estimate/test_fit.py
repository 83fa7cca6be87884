"""`hf-lowprec estimate --fit` finds the best settings whose training fits."""

import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowprec
from hf_lowprec.tools.cli.estimate import best
from hf_lowprec.tools.estimate.activations import estimate_activations
from hf_lowprec.tools.estimate.fit import OPTIONS, RESERVE, find_fit
from hf_lowprec.tools.estimate.memory import low_precision_row
from tests.scripts import trainer_ranks
from tests.support.docs.pages import ROOT
from tests.support.processes.fsdp_on_cpu import accelerator_arguments, allow_fsdp_on_cpu
from tests.support.processes.ranks import on_ranks
from tests.support.training.tiny_trainer import llama, trained

OPTION = {option.title: option for option in OPTIONS}


def build():
    with torch.device("meta"):
        return LlamaForCausalLM(llama().config)


def fit(gpu_bytes, *, gpus=1, batch_size=8, steps=1, length=16, checkpointing=False):
    return find_fit(build, gpu_bytes, gpus, batch_size, length, steps, checkpointing)


def test_the_best_setting_is_the_first_that_fits():
    everything = fit(1 << 40, batch_size=1)
    assert [setting.option for setting in everything] == [*OPTIONS]
    peaks = {setting.option: setting.peak for setting in everything}
    peak = sorted({*peaks.values()})[len({*peaks.values()}) // 2]
    assert best(fit(peak + RESERVE, batch_size=1)).option == next(each for each in OPTIONS if peaks[each] <= peak)
    least = min(peaks.values())
    nothing = fit(least + RESERVE - 1, batch_size=1)
    assert best(nothing) is None and min(setting.missing for setting in nothing) == 1


@pytest.mark.every_case
def test_a_step_sees_the_same_sequences_and_releases_no_sums():
    small = fit(RESERVE, length=512, steps=2)
    assert [setting.option for setting in small] == [
        option for option in OPTIONS if "gradient_release" not in option.optim_args
    ]
    assert {setting.batch_size * setting.gradient_accumulation_steps for setting in small} == {16}
    without, split, *_ = small
    assert (without.batch_size, split.batch_size) == (8, 1)
    assert best(fit(split.peak + RESERVE, length=512, steps=2)).batch_size == 1
    once = fit(RESERVE, length=512)
    released = [setting for setting in once if "gradient_release" in setting.option.optim_args]
    assert {(setting.batch_size, setting.gradient_accumulation_steps) for setting in released} == {(8, 1)}
    assert all(setting.option.gradient_checkpointing for setting in fit(1 << 40, checkpointing=True))


def test_shards_of_gradients_are_summed_where_whole_ones_do_not_fit(monkeypatch):
    monkeypatch.setattr("hf_lowprec.tools.estimate.fit.OPTIONS", OPTIONS[:2])
    whole, shards = (fit(room, gpus=64, batch_size=1, steps=2)[1] for room in (1 << 40, RESERVE))
    assert (whole.sync_each_batch, shards.sync_each_batch) == (False, True)
    gradients = sum(param.nbytes // 2 for param in build().parameters())
    assert gradients < whole.peak - shards.peak < 1.05 * gradients  # norms' are FP32
    assert not fit(RESERVE, gpus=64, batch_size=1)[1].sync_each_batch


def reduced_after(sync_each_batch: bool) -> list[bool]:
    """After which micro-batches FSDP2 has reduced the gradients to shards."""
    allow_fsdp_on_cpu()
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=sync_each_batch)
    sharding = accelerator_arguments("fsdp2", auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **sharding)
    model = trainer_ranks.llama()
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters())
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    reduced = []
    for row in trainer_ranks.text(3):
        tokens = row["input_ids"][None]
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            reduced.append(all(isinstance(param.grad, DTensor) for param in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    return reduced


@pytest.mark.distributed
def test_fsdp2_keeps_shards_if_every_batch_is_reduced():
    assert on_ranks(reduced_after, 2, False) == [False, False, True]
    assert on_ranks(reduced_after, 2, True) == [True, True, True]


@pytest.mark.parametrize("title", ["split, 8-bit states, release", "stochastic"])
def test_peak_and_checkpoint_are_those_of_training(tmp_path, title):
    option = OPTION[title]
    (setting,) = (each for each in fit(1 << 40, gpus=2, checkpointing=True) if each.option == option)
    model = build()
    row = low_precision_row(model, option.optim, option.optim_args or None, 2)
    assert setting.peak == row._replace(activations=estimate_activations(model, 8, 16, True)).peak(2, 1)
    trained(tmp_path, max_steps=1, save_strategy="steps", optim=option.optim, optim_args=option.optim_args or None)
    files = ("model.safetensors", "optimizer.pt")
    saved = sum((tmp_path / "checkpoint-1" / name).stat().st_size for name in files)
    assert setting.checkpoint < saved < setting.checkpoint + 64_000  # names, shapes and the settings of param groups


@pytest.mark.every_case
@pytest.mark.slow
def test_the_peak_is_that_measured_on_a_gpu():
    """`make report-gpu` trained a Llama of this shape with 1.24 billion parameters."""
    result = json.loads((ROOT / "benchmarks" / "results" / "gpu-step-h100-2026-11-26.json").read_text())
    shape = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    surplus = []
    for table in result["training"]:
        activations = None
        for measured in table["rows"]:
            name = measured["way"].partition("BF16, hf_lowprec ")[2].replace("gradient release", "release")
            if name not in OPTION:  # FP32 with autocast
                continue
            with torch.device("meta"):
                model = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True))
            row = low_precision_row(model, OPTION[name].optim, OPTION[name].optim_args or None)
            if activations is None:
                activations = estimate_activations(model, table["batch"], table["length"])
            surplus.append(row._replace(activations=activations).peak(1, 1) / 1e9 / measured["peak_gigabytes"] - 1)
    assert len(surplus) == 6
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert f"{min(surplus):.1%} to {max(surplus):.1%} more than" in " ".join(page.split())
