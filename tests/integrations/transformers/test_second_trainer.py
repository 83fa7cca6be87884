"""A second Trainer of the same model begins with the FP32 estimates that the first one has ended with."""

import copy
import warnings

import pytest
import torch
from transformers import TrainerCallback

from hf_lowprec import fp32_state_dict
from hf_lowprec.optim.initial_compensation import reset_compensations
from hf_lowprec.optim.state_dict_format import LOW_BITS
from hf_lowprec.rounding.low_bits import low_bits
from hf_lowprec.rounding.spacing import spacing
from tests.support.training.peft_adapters import adapted
from tests.support.training.tiny_trainer import LOAD_BEST, llama, optimizer_of, trained

BF16 = torch.bfloat16
STILL = {"learning_rate": 0.0, "max_steps": 1}
"""A first step that creates the states and moves nothing."""


def estimates(trainer) -> dict[str, torch.Tensor]:
    return fp32_state_dict(trainer.model, optimizer_of(trainer))


def with_low_bits(model) -> set[str]:
    return {name for name, param in model.named_parameters() if low_bits(param) is not None}


def in_16_bits(model) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad and param.dtype == BF16}


class Beginning(TrainerCallback):
    """Keeps the FP32 estimates before the first step."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.estimates = fp32_state_dict(model, optimizer)


@pytest.mark.parametrize("second", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("first", ["adamw_bf16_kahan", "adamw_bf16_split", "adamw_bf16_split24"])
@pytest.mark.parametrize("loaded_in", ["FP32", "BF16"])
@pytest.mark.parametrize("seed", [0, 5])
def test_it_begins_with_the_fp32_weights_of_the_first(tmp_path, capsys, loaded_in, first, second, seed):
    """With a BF16 model they include a dither; a second optimizer with the same seed would draw the same one."""
    model = llama() if loaded_in == "FP32" else llama().to(BF16)
    earlier = trained(tmp_path, model, max_steps=3, learning_rate=1e-4, optim=first, optim_args="seed=0")
    expected, beginning = estimates(earlier), Beginning()
    del earlier
    capsys.readouterr()
    assert with_low_bits(model) == in_16_bits(model)
    later = trained(tmp_path, model, callbacks=[beginning], optim=second, optim_args=f"seed={seed}", **STILL)
    assert "starts with low bits" in capsys.readouterr().out
    found = estimates(later)
    is_dithered = loaded_in == "BF16"
    assert bool(optimizer_of(later).dithered) == (is_dithered and seed == 0 and first == second)
    for name, value in expected.items():
        assert torch.equal(beginning.estimates[name], value), name
        # A BF16 compensation holds 8 bits of what is half a spacing at most, twice that with a dither.
        lost = 2.0**-8 * spacing(value, BF16) if second.endswith("kahan") and "norm" not in name else 0.0
        assert ((found[name] - value).abs() <= lost).all(), name
    assert any((value != value.to(BF16)).any() for name, value in expected.items() if "norm" not in name)


def test_low_bits_take_no_memory_beside_the_optimizer(tmp_path):
    trainer = trained(tmp_path, max_steps=1, optim="adamw_bf16_kahan")
    for param in trainer.model.parameters():
        if param.dtype == BF16:
            state = optimizer_of(trainer).state[param]["compensation"]
            assert low_bits(param).data_ptr() == state.data_ptr()


def test_adapters_go_on_as_well(tmp_path):
    model = adapted("lora")
    earlier = trained(tmp_path, model, max_steps=2, optim="adamw_bf16_split")
    expected = estimates(earlier)
    assert with_low_bits(model) == in_16_bits(model)
    found = estimates(trained(tmp_path, model, optim="adamw_bf16_split", **STILL))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_nothing_of_them_is_saved_with_the_model_or_twice_with_the_optimizer(tmp_path):
    trainer = trained(tmp_path, max_steps=1, optim="adamw_bf16_kahan")
    assert with_low_bits(trainer.model)
    assert LOW_BITS not in optimizer_of(trainer).state_dict()
    assert not any(vars(value) for value in trainer.model.state_dict().values())


def test_the_same_trainer_goes_on_with_its_optimizer(tmp_path):
    """The second `train()` does not notice that low bits were kept."""
    found = []
    for keeps in (True, False):
        trainer = trained(tmp_path, max_steps=3, optim="adamw_bf16_kahan")
        if not keeps:
            for param in trainer.model.parameters():
                vars(param).pop("_low_bits", None)
        trainer.train()
        found.append(copy.deepcopy(optimizer_of(trainer).state_dict()["state"]) | trainer.model.state_dict())
        assert with_low_bits(trainer.model) == in_16_bits(trainer.model)
        head = trainer.model.lm_head.weight  # the FP32 sum of two BF16 numbers of close exponents is exact
        assert torch.equal(estimates(trainer)["lm_head.weight"], head.detach().float() + low_bits(head).float())
    for key, value in found[0].items():
        states = zip(value.values(), found[1][key].values(), strict=True) if isinstance(value, dict) else ()
        assert all(torch.equal(a, b) for a, b in states)
        assert isinstance(value, dict) or torch.equal(value, found[1][key])


def test_low_bits_of_weights_that_have_changed_are_not_used(tmp_path):
    trainer = trained(tmp_path, max_steps=1, optim="adamw_bf16_kahan")
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(2)
    assert with_low_bits(trainer.model) == in_16_bits(trainer.model) - {"lm_head.weight"}


def test_a_mode_without_a_place_for_them_says_that_they_are_dropped(tmp_path):
    model = llama()
    trained(tmp_path, model, max_steps=1, optim="adamw_bf16_kahan")
    with pytest.warns(RuntimeWarning, match=r"or an earlier Trainer has kept of \d+ parameters are dropped"):
        trained(tmp_path, model, max_steps=1, optim="adamw_bf16_sr")
    assert not any("_low_bits" in vars(param) for param in model.parameters())
    with warnings.catch_warnings(action="error", category=RuntimeWarning):
        trained(tmp_path, model, max_steps=1, optim="adamw_bf16_sr")


def test_the_best_weights_keep_none(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", **LOAD_BEST)
    assert not with_low_bits(trainer.model)


def test_low_bits_of_an_earlier_end_are_dropped_when_other_weights_are_loaded(tmp_path):
    trainer = trained(tmp_path, max_steps=1, optim="adamw_bf16_kahan")
    reset_compensations(optimizer_of(trainer))
    assert not with_low_bits(trainer.model)


def test_released_gradients_leave_them_too(tmp_path):
    args = {"optim_args": "gradient_release=True", "max_grad_norm": 0}
    trainer = trained(tmp_path, max_steps=2, optim="adamw_bf16_kahan", **args)
    assert with_low_bits(trainer.model) == in_16_bits(trainer.model)
