"""The cast of the variants that are not ours."""

import torch

from hf_lowprec.tools.demo import stages
from hf_lowprec.tools.demo.training import cast_whole_model


def test_the_naive_cast_includes_norms_and_keeps_the_rotary_frequencies() -> None:
    model = stages.small_llama(0)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cast_whole_model(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
