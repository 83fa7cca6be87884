"""A loop of one's own, with the versions that a program pins whose own code does not run here."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowprec

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
hf_lowprec.cast_model(model)
optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-6, rounding="split", max_grad_norm=1.0)


def train(steps: int) -> dict[str, torch.Tensor]:
    """Take steps; return the FP32 values of the weights."""
    for _ in range(steps):
        tokens = torch.randint(0, 64, (4, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in hf_lowprec.fp32_state_dict(model, optimizer).items()}


first, last = train(1), train(3)
moved = torch.cat([(last[name] != value).flatten() for name, value in first.items()]).float().mean()
assert moved > 0.9, moved  # at 1e-6, weights rounded to nearest would stay
exact = LlamaForCausalLM(model.config)
exact.load_state_dict(last)
exact.save_pretrained("saved")
print(f"{moved:.1%} of the weights have moved")
