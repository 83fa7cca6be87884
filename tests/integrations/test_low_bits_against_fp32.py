"""How close Kahan with low bits comes to FP32 from the same FP32 checkpoint; each model computes its own gradients."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_lowprec
from tests.support.training.tiny_trainer import LENGTH, VOCABULARY, counting_data

ROWS = torch.stack([row["input_ids"] for row in counting_data(256)])


def llama() -> LlamaForCausalLM:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.1, **size))


def gpt2() -> GPT2LMHeadModel:
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, initializer_range=0.1, **size, **dropout))


def train(model, optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        batch = ROWS[torch.randint(0, len(ROWS), (16,), generator=generator)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def distances(build, seed: int) -> list[float]:
    """Distance of `fp32_state_dict` to the weights that torch's FP32 AdamW ends with, in units of its displacement.

    With low bits kept by the cast, and without.
    """
    torch.manual_seed(seed)
    reference = build()
    start = {name: param.detach().clone() for name, param in reference.named_parameters()}
    train(reference, torch.optim.AdamW(reference.parameters(), lr=2e-5), seed)
    final = dict(reference.named_parameters())
    moved = torch.cat([(final[name].detach() - start[name]).flatten() for name in start])
    found = []
    for keeps in (True, False):
        torch.manual_seed(seed)
        model = build()
        hf_lowprec.cast_model(model, keep_low_bits=keeps)
        optimizer = hf_lowprec.AdamW(model.parameters(), lr=2e-5)
        train(model, optimizer, seed)
        estimates = hf_lowprec.fp32_state_dict(model, optimizer)
        ours = torch.cat([(estimates[name] - start[name]).flatten() for name in start])
        found.append(((ours - moved).norm() / moved.norm()).item())
    return found


@pytest.mark.combinations(1)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.every_case) for seed in (1, 2))])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_twenty_steps_from_an_fp32_checkpoint(build, seed):
    """Measured 0.013 (Llama) and 0.023 (GPT-2) on each seed; without low bits 0.6 and 0.52.

    Weights of σ 0.1 are spaced 2**-11 on average, so what the cast rounds off has a standard deviation of 1.4e-4, a
    third of the displacement of 20 steps of up to 2e-5.
    """
    low_bits, zero = distances(build, seed)
    assert low_bits <= 0.03
    assert zero >= 0.4
