"""Averages of a BF16 model's weights follow the FP64 average of the FP32 estimates."""

import warnings

import pytest
import torch
from torch.optim import swa_utils
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

import hf_lowprec
from tests.support.models.tiny_models import gpt2
from tests.support.training.tiny_trainer import counting_data, llama, optimizer_of, trained

OURS = hf_lowprec.AveragedModel
STEPS, DECAY = 40, 0.99
INPUTS = torch.stack([row["input_ids"] for row in counting_data(8)])


def prepared(rounding="kahan", lr=1e-3):
    model = llama()
    hf_lowprec.cast_model(model)
    return model, hf_lowprec.AdamW(model.parameters(), lr=lr, rounding=rounding)


def step(model, optimizer):
    model(input_ids=INPUTS, labels=INPUTS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def estimates(model, optimizer):
    """Weight plus compensation, or the master weight, in FP64, without the code under test."""

    def exact(param, state):
        if "remainder" in state:
            return (param.detach().float().view(torch.int32) + state["remainder"]).view(torch.float32).double()
        return param.detach().double() + (state["compensation"].double() if "compensation" in state else 0)

    return {name: exact(param, optimizer.state[param]) for name, param in model.named_parameters()}


@pytest.mark.combinations(1)
@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic"])
@pytest.mark.parametrize(
    ("functions", "weight"),
    [
        ({"multi_avg_fn": get_ema_multi_avg_fn(DECAY)}, lambda k: 1 - DECAY),
        ({"avg_fn": get_ema_avg_fn(DECAY)}, lambda k: 1 - DECAY),
        ({}, lambda k: 1 / (k + 1)),
    ],
    ids=["ema", "ema_one_by_one", "swa"],
)
def test_the_average_is_that_of_fp64(rounding, functions, weight):
    model, optimizer = prepared(rounding)
    averaged = hf_lowprec.AveragedModel(model, **functions)
    exact = None
    for k in range(STEPS):
        step(model, optimizer)
        averaged.update_parameters(model, optimizer)
        now = estimates(model, optimizer)
        exact = now if exact is None else {n: exact[n] + weight(k) * (now[n] - exact[n]) for n in now}
    assert int(averaged.n_averaged) == STEPS
    for name, average in averaged.module.named_parameters():
        assert average.dtype == torch.float32
        # FP32 rounds each estimate once (2^-24 relative) and each update at most three times, errors adding up linearly
        # at worst; a norm's weight, the largest here, is about 1.
        bound = 4 * STEPS * 2**-24 * exact[name].abs().max()
        assert (average.double() - exact[name]).abs().max() < bound, name


@pytest.mark.parametrize("build", [lambda: (llama(), {"input_ids": INPUTS}), lambda: gpt2(tied=True)])
def test_the_averaged_model_is_an_fp32_model_like_one_that_was_never_cast(build):
    """Copied before any step: the model it came from, with weights rounded once."""
    model, inputs = build()
    fresh, _ = build()
    rounded = {name: p.to(torch.bfloat16) if p.dim() > 1 else p for name, p in fresh.state_dict().items()}
    fresh.load_state_dict(rounded)
    hf_lowprec.cast_model(model)
    averaged = hf_lowprec.AveragedModel(model)
    with torch.no_grad():
        assert torch.equal(averaged.eval()(**inputs).logits, fresh.eval()(**inputs).logits)
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    module = averaged.module
    assert (module.get_input_embeddings().weight is module.get_output_embeddings().weight) == tied


def test_the_optimizer_must_be_that_of_the_model(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)
    averaged = hf_lowprec.AveragedModel(trainer.model)
    averaged.update_parameters(trainer.model, trainer.optimizer)  # accelerate's wrapper
    averaged.update_parameters(trainer.model, optimizer_of(trainer))
    with pytest.raises(ValueError, match="has none of the model's parameters"):
        averaged.update_parameters(llama(), trainer.optimizer)


def partly(model):
    return hf_lowprec.AdamW([p for name, p in model.named_parameters() if "lm_head" not in name])


FOREIGN = {
    "torch's": (
        lambda model: torch.optim.AdamW(model.parameters()),
        r"^model\.embed_tokens\.weight.* and \d+ more: their stored",
    ),
    "ours, of other parameters": (partly, r"^lm_head\.weight: their stored 16-bit values are used, since this AdamW "),
}


@pytest.mark.parametrize(("build", "message"), FOREIGN.values(), ids=FOREIGN)
def test_an_optimizer_that_knows_no_more_than_the_weights_is_said_once(build, message):
    """The average is that of the weights as they are stored, as torch users would have it."""
    model, _ = prepared()
    optimizer = build(model)
    averaged = hf_lowprec.AveragedModel(model)
    step(model, optimizer)
    with pytest.warns(RuntimeWarning, match=message) as caught:
        averaged.update_parameters(model, optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    assert torch.equal(averaged.module.lm_head.weight, model.lm_head.weight.float())
    with pytest.warns(RuntimeWarning, match=message) as caught:
        full = hf_lowprec.fp32_state_dict(model, optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    assert torch.equal(full["lm_head.weight"], model.lm_head.weight.float())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averaged.update_parameters(model, optimizer)


def test_what_loses_nothing_is_not_warned_of():
    """Weights of ours in any mode, those that are frozen, and an FP32 model under torch's own optimizer."""
    for rounding in ("kahan", "stochastic"):
        model, _ = prepared()
        model.lm_head.requires_grad_(False)
        optimizer = hf_lowprec.AdamW([p for p in model.parameters() if p.requires_grad], rounding=rounding)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hf_lowprec.AveragedModel(model).update_parameters(model, optimizer)
            hf_lowprec.fp32_state_dict(model, optimizer)
    plain = torch.nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_lowprec.AveragedModel(plain).update_parameters(plain, torch.optim.AdamW(plain.parameters()))


def test_torchs_signature_for_a_model_in_16_bits_is_an_error_that_says_what_is_missing():
    """A compensation that is left out would be lost in silence."""
    model, optimizer = prepared()
    averaged = hf_lowprec.AveragedModel(model)
    before = {name: tensor.clone() for name, tensor in averaged.state_dict().items()}
    step(model, optimizer)
    with pytest.raises(TypeError, match=r"needs optimizer= .* call update_parameters\(model, optimizer\)"):
        averaged.update_parameters(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in averaged.state_dict().items())


@pytest.mark.parametrize("use_buffers", [True, False])
def test_torchs_signature_for_a_model_in_fp32_is_torchs_average(use_buffers):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    functions = {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)}
    ours, torchs = (cls(model, **functions, use_buffers=use_buffers) for cls in (OURS, swa_utils.AveragedModel))
    for _ in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param))
        model(torch.randn(8, 4))
        ours.update_parameters(model)
        torchs.update_parameters(model)
    for name, tensor in torchs.state_dict().items():  # a counter is copied here, and left behind by torch
        assert torch.equal(ours.state_dict()[name], tensor) or "num_batches" in name, name
