"""What an optimizer says before its first step: a model that nobody has cast, lines in the wrong order, 16-bit sums
over ranks. And when it says nothing."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM, Trainer

import hf_lowprec
from hf_lowprec.integrations.live_models import setup_warnings
from tests.support.processes.ranks import run_ranks
from tests.support.training.tiny_trainer import arguments, counting_data, llama, trained

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(setup_warnings, "_searches", Counter())


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def stepped(model, optimizer_cls=hf_lowprec.AdamW, steps=1, params=None):
    optimizer = optimizer_cls([p for p in params or model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        optimizer.step()
    return optimizer


def test_an_fp32_model_that_nobody_has_cast_is_said_once(caplog):
    model = llama()
    stepped(model, steps=3)
    (text,) = said(caplog)
    assert "the model is FP32 throughout, so it trains in FP32; it was never cast." in text
    assert "hf_lowprec.cast_model(model) before building the optimizer" in text
    stepped(llama())
    assert len(said(caplog)) == 1


def test_the_callback_that_was_forgotten(tmp_path, caplog):
    """Our optimizer, given to a Trainer whose `optim` is another one."""
    wanted = hf_lowprec.optimizer_factory("adamw_bf16_kahan", lr=1e-3)
    trained(tmp_path, optimizer_cls_and_kwargs=wanted, max_steps=2)
    assert len([text for text in said(caplog) if "LowPrecisionCallback" in text]) == 1
    caplog.clear()
    setup_warnings._searches.clear()
    callbacks = [hf_lowprec.LowPrecisionCallback(report=False)]
    trained(tmp_path, optimizer_cls_and_kwargs=wanted, max_steps=2, callbacks=callbacks)
    assert not [text for text in said(caplog) if "FP32" in text]


def cast(model, **options):
    hf_lowprec.cast_model(model, **options)
    return model


def adapters(model):
    """FP32 adapters on a frozen base, as PEFT leaves them."""
    model.requires_grad_(False)
    model.low_rank = nn.ModuleList([nn.Linear(64, 16), nn.Linear(16, 64)])
    return model


class Quantized(nn.Module):
    """A base of 8-bit codes, FP32 adapters and norms: nothing of it is in 16 bits."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
        self.low_rank, self.norm = nn.Linear(64, 16), nn.LayerNorm(64)


class Ema(nn.Linear):
    """A layer that is trained."""


def averaged(average):
    """A cast model and its average."""
    model = cast(nn.Sequential(nn.Linear(64, 64)))
    return nn.ModuleList([model, average(model).requires_grad_(False)])


SILENT = {
    "a cast model": lambda: cast(llama()),
    "kept in FP32 as a whole": lambda: cast(nn.Sequential(nn.Linear(64, 64)), keep_fp32="0"),
    "adapters on a base in 16 bits": lambda: adapters(llama().to(BF16)),
    "adapters on a base that was cast": lambda: adapters(cast(llama())),
    "adapters on a quantized base": Quantized,
    "a head on a base in 16 bits": lambda: nn.ModuleList([llama().to(BF16).requires_grad_(False), nn.Linear(64, 64)]),
    "a small model": lambda: nn.Linear(8, 8),
    "vectors": lambda: nn.LayerNorm(4096),
    "16 bits as loaded": lambda: AutoModelForCausalLM.from_config(llama().config, dtype=BF16),
    "an average in FP32": lambda: averaged(hf_lowprec.AveragedModel),
    "a layer with a name like an average": lambda: cast(Ema(64, 64)),
}


@pytest.mark.parametrize("build", SILENT.values(), ids=SILENT)
def test_what_is_as_it_should_be_is_not_said(caplog, build):
    stepped(build())
    assert not said(caplog)


def trained_on_data(model, optimizer):
    tokens = torch.stack([row["input_ids"] for row in counting_data(8)])
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def test_an_optimizer_that_was_built_before_the_embeddings_were_resized(caplog):
    model = cast(llama())
    head = model.lm_head.weight
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    model.resize_token_embeddings(80, mean_resizing=False)
    assert model.lm_head.weight is not head, "transformers replaces it"
    trained_on_data(model, optimizer)
    assert model.lm_head.weight not in optimizer.state, "not trained, as the warning says"
    (text,) = said(caplog)
    assert "1 of the optimizer's 21 parameters (shape (64, 32), …) have no gradient and are no longer in any" in text
    assert "resize_token_embeddings" in text and "build the optimizer after that line" in text


def test_an_optimizer_that_was_built_after_the_embeddings_were_resized(caplog):
    model = cast(llama())
    model.resize_token_embeddings(80, mean_resizing=False)
    model.unused = nn.Linear(4, 4)  # without gradients, but in the model
    trained_on_data(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))
    assert not said(caplog)


@pytest.mark.parametrize(
    "convert", [lambda model: model.to(BF16), lambda model: model.bfloat16()], ids=["to", "bfloat16"]
)
def test_a_model_that_is_converted_after_the_cast(caplog, convert):
    stepped(convert(cast(llama())))
    (text,) = said(caplog)
    assert "5 modules that cast_model has kept in FP32 (LlamaRMSNorm, …) are in 16 bits" in text
    assert "as with model.to(torch.bfloat16) or Lightning's precision='bf16-true'. Remove that line" in text


def test_rotary_embeddings_that_were_converted_with_the_model(caplog):
    model = llama().to(BF16)
    stepped(model)
    (text,) = said(caplog)
    assert "rotary embeddings (LlamaRotaryEmbedding) are in 16 bits and encode wrong positions" in text
    assert "Call hf_lowprec.cast_model(model) instead of that line, or after it" in text
    hf_lowprec.cast_model(model)  # what the warning says
    exact = llama().model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)


def test_an_average_in_16_bits(caplog):
    model = averaged(AveragedModel)
    stepped(model, params=model[0].parameters())
    (text,) = said(caplog)
    assert text.startswith("hf_lowprec: AveragedModel averages weights in 16 bits")
    assert "Use hf_lowprec.AveragedModel(model)" in text


def test_tensors_that_belong_to_no_model(caplog):
    param = nn.Parameter(torch.zeros(64, 64))
    param.grad = torch.ones_like(param)
    hf_lowprec.AdamW([param], lr=1e-3).step()
    assert not said(caplog)


def test_released_gradients_were_there(caplog, monkeypatch):
    """Parameters that were stepped during the backward pass have no gradient any more. None of these has a module."""
    monkeypatch.setattr("hf_lowprec.optim.gradient_release.buckets.BUCKET_ELEMENTS", 1)
    params = [nn.Parameter(torch.zeros(64, 64, dtype=BF16)) for _ in range(3)]
    optimizer = hf_lowprec.AdamW(params, lr=1e-3, gradient_release=True)
    sum(param.float().sum() for param in params).backward()
    assert params[2].grad is None or params[0].grad is None
    optimizer.step()
    assert not said(caplog)
    optimizer = hf_lowprec.AdamW([*params, nn.Parameter(torch.ones(3))], lr=1e-3, gradient_release=True)
    sum(param.float().sum() for param in params).backward()
    optimizer.step()
    (text,) = said(caplog)
    assert "1 of the optimizer's 4 parameters (shape (3,), …) have no gradient" in text


def test_norms_and_adapters_alone_in_their_optimizer(caplog):
    """One of several optimizers: the model counts, not what this one trains."""
    model = cast(llama(), keep_fp32="lm_head")
    stepped(model, params=list(model.lm_head.parameters()))
    stepped(model, params=[p for p in model.parameters() if p.dtype == torch.float32])
    assert not said(caplog)


def test_nothing_is_looked_for_after_the_first_step(monkeypatch):
    model = cast(llama())
    optimizer = stepped(model)
    monkeypatch.setattr(hf_lowprec.AdamW, "first_step_checks", [lambda optimizer: pytest.fail("looked again")])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model.lm_head.weight.grad = None  # another plan
    optimizer.step()


def test_an_optimizer_per_parameter_searches_a_few_times_only(monkeypatch):
    model, looked = adapters(llama().to(BF16)), []
    monkeypatch.setattr(setup_warnings, "_in_fp32_model", lambda params: bool(looked.append(params)))
    for param in model.low_rank.parameters():
        for _ in range(setup_warnings._SEARCHES):
            stepped(model, params=[param])
    assert len(looked) == setup_warnings._SEARCHES


def test_nothing_is_looked_for_after_its_warning(monkeypatch, caplog):
    looked = []
    monkeypatch.setattr(setup_warnings, "_in_fp32_model", lambda params: looked.append(params) is None)
    for _ in range(3):
        stepped(llama())
    assert len(looked) == len(said(caplog)) == 1


def test_a_trainer_with_one_of_our_names_says_nothing(tmp_path, caplog):
    Trainer(llama(), arguments(tmp_path, optim="adamw_bf16_kahan", max_steps=1), train_dataset=counting_data()).train()
    assert not [text for text in said(caplog) if "FP32" in text]


@pytest.mark.slow
@pytest.mark.distributed
def test_sums_in_16_bits_over_ranks():
    printed = run_ranks("setup_warnings.py", 2)
    assert "plain DDP: 1" in printed
    for quiet in ("reduce_in_fp32", "another hook", "every rank alone", "accelerate, prepared"):
        assert f"{quiet}: 0" in printed
    assert "accelerate, not prepared: 1" in printed


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_said_under_fsdp2():
    printed = run_ranks("setup_warnings.py", 2, "fsdp2")
    for line, warning in {
        "plain": "FSDP2 sums",
        "reduce_scatter_in_fp32": "nothing",
        "policy": "nothing",
        "built before fully_shard": "parameters were replaced",
        "never cast": "never cast",
        "accelerate, not prepared": "FSDP2 sums",
        "accelerate, prepared": "nothing",
    }.items():
        assert f"fsdp2, {line}: {warning}\n" in printed
