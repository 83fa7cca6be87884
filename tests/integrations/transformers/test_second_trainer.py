"""A second Trainer of the same model begins with the FP32 estimates that the first one has ended with."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from hf_lowprec import export_checkpoint, fp32_state_dict
from hf_lowprec.integrations.transformers import callback, private_apis
from hf_lowprec.integrations.transformers.checkpoints import load
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.state.saved_formats import LOW_BITS
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from hf_lowprec.rounding.nearest import spacing
from tests.support.chosen_cases import nightly_except
from tests.support.training.fp32_weights_at_start import Beginning
from tests.support.training.tiny_trainer import LOAD_BEST, arguments, counting_data, llama, optimizer_of, trained

BF16 = torch.bfloat16
STILL = {"learning_rate": 0.0, "max_steps": 1}
"""A first step that creates the states and moves nothing."""
FIRST_IS_BEST = {**LOAD_BEST, "max_steps": 8, "metric_for_best_model": "loss", "greater_is_better": True}
"""Of two checkpoints, the first is loaded in the end: losses fall."""


def estimates(trainer) -> dict[str, torch.Tensor]:
    return fp32_state_dict(trainer.model, optimizer_of(trainer))


def with_low_bits(model) -> set[str]:
    return {name for name, param in model.named_parameters() if attached_low_bits(param) is not None}


def in_16_bits(model) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad and param.dtype == BF16}


@pytest.mark.parametrize("evaluated_only", [False, True])
def test_autocast_of_a_first_trainer_ends_with_it(tmp_path, evaluated_only):
    """A baseline is evaluated or trained with bf16=True; then the same model trains as one that it never had."""
    model = llama()
    first = Trainer(model, arguments(tmp_path, bf16=True, max_steps=2), train_dataset=counting_data())
    first.evaluate(counting_data(16))
    if not evaluated_only:
        first.train()
    copied = llama()
    copied.load_state_dict(model.state_dict())
    options = {"optim": "adamw_bf16_split", "optim_args": "keep_fp32=*.down_proj", "max_steps": 3}
    found, expected = (trained(tmp_path, each, **options).model for each in (model, copied))
    assert not hasattr(model, "_original_forward")
    assert all(map(torch.equal, found.parameters(), expected.parameters()))


@pytest.mark.parametrize("second", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("first", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("loaded_in", ["FP32", "BF16"])
def test_it_begins_with_the_fp32_weights_of_the_first(tmp_path, capsys, loaded_in, first, second):
    model = llama() if loaded_in == "FP32" else llama().to(BF16)
    earlier = trained(tmp_path, model, max_steps=3, learning_rate=1e-4, optim=first)
    expected, beginning = estimates(earlier), Beginning()
    del earlier
    capsys.readouterr()
    assert with_low_bits(model) == in_16_bits(model)
    later = trained(tmp_path, model, callbacks=[beginning], optim=second, **STILL)
    assert "starts with low bits" in capsys.readouterr().out
    found = estimates(later)
    for name, value in expected.items():
        assert torch.equal(beginning.estimates[name], value), name
        # A BF16 compensation holds 8 bits of what is half a spacing at most.
        lost = 2.0**-9 * spacing(value, BF16) if second.endswith("kahan") and "norm" not in name else 0.0
        assert ((found[name] - value).abs() <= lost).all(), name
    assert any((value != value.to(BF16)).any() for name, value in expected.items() if "norm" not in name)


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
        exact = head.detach().float() + attached_low_bits(head).float()
        assert torch.equal(estimates(trainer)["lm_head.weight"], exact)
    for key, value in found[0].items():
        states = zip(value.values(), found[1][key].values(), strict=True) if isinstance(value, dict) else ()
        assert all(torch.equal(a, b) for a, b in states)
        assert isinstance(value, dict) or torch.equal(value, found[1][key])


@pytest.mark.combinations(1)
@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("loaded_in", ["FP32", "BF16"])
def test_the_best_weights_are_fp32_weights_too(tmp_path, loaded_in, optim):
    """After `load_best_model_at_end`, the weights are those that an export of the best checkpoint contains."""
    model = llama() if loaded_in == "FP32" else llama().to(BF16)
    trainer = trained(tmp_path, model, optim=optim, **FIRST_IS_BEST)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert with_low_bits(model) == in_16_bits(model)
    found = estimates(trainer)
    export_checkpoint(tmp_path / "checkpoint-4", tmp_path / "exported")
    expected = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    beginning = Beginning()
    del trainer
    trained(tmp_path / "second", model, callbacks=[beginning], optim=optim, **STILL)
    assert all(torch.equal(beginning.estimates[name], value) for name, value in expected.items())


@pytest.mark.parametrize("first", nightly_except({"split", "kahan"}, ["stochastic", "split", "kahan"]))
def test_the_best_weights_of_an_earlier_rounding_mode_are_fp32_weights_too(tmp_path, first):
    """A remainder holds what a compensation does; the reverse rounds it to the 8 bits of a BF16 number."""
    schedule = f"rounding={first}:0.5|{'kahan' if first == 'split' else 'split'}"
    trainer = trained(tmp_path, optim="adamw_bf16_split", optim_args=schedule, **FIRST_IS_BEST)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    export_checkpoint(tmp_path / "checkpoint-4", tmp_path / "exported")
    found, differences = estimates(trainer), 0
    for name, value in load_file(tmp_path / "exported" / "model.safetensors").items():
        lost = 2.0**-9 * spacing(value, BF16) if first == "split" and "norm" not in name else 0.0
        assert ((found[name] - value).abs() <= lost).all(), name
        differences += int((value != value.to(BF16)).sum()) if "norm" not in name else 0
    assert bool(differences) == (first != "stochastic")


class Damage(TrainerCallback):
    """Leaves the best checkpoint without a state that can be read."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and not args.save_only_model:
            (Path(args.output_dir) / "checkpoint-4" / "optimizer.pt").write_bytes(b"0")


@pytest.mark.parametrize("save_only_model", [True, False])
def test_the_best_weights_keep_none_if_the_checkpoint_has_none(tmp_path, caplog, save_only_model):
    settings = {"optim": "adamw_bf16_kahan", "save_only_model": save_only_model, **FIRST_IS_BEST}
    trainer = trained(tmp_path, callbacks=[Damage()], **settings)
    assert not with_low_bits(trainer.model)
    assert f"the best weights, of {tmp_path / 'checkpoint-4'}, were loaded as they are stored" in caplog.text
    stored = trainer.model.state_dict()
    assert all(torch.equal(value, stored[name].float()) for name, value in estimates(trainer).items())


@pytest.mark.parametrize("steps", [4, 3])
def test_the_last_weights_keep_theirs_if_they_are_the_best(tmp_path, caplog, steps):
    """Also without a file to read them from, and after three steps, when no weights have been evaluated."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == steps

    trainer = trained(tmp_path, optim="adamw_bf16_split", callbacks=[Stop()], save_only_model=True, **FIRST_IS_BEST)
    assert bool(trainer.state.best_model_checkpoint) == (steps == 4)
    assert with_low_bits(trainer.model) == in_16_bits(trainer.model)
    found = estimates(trainer)["lm_head.weight"]
    assert not torch.equal(found, found.to(BF16).float())
    assert "best weights" not in caplog.text


class EndsBy(TrainerCallback):
    """Raises an exception in the forward pass of a step, or after the step with `after=True`."""

    def __init__(self, error: BaseException, step: int = 3, after: bool = False) -> None:
        self.error, self.step, self.after = error, step, after

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step and not self.after:
            model.lm_head.register_forward_pre_hook(self._raise)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.after:
            raise self.error

    def _raise(self, module, inputs):
        module._forward_pre_hooks.clear()
        raise self.error


def ended_by(error: BaseException, tmp_path, step: int = 3, after: bool = False, **settings) -> Trainer:
    """A Trainer whose run has raised `error`."""
    args = arguments(tmp_path, learning_rate=1e-4, **{"optim": "adamw_bf16_split", **settings})
    trainer = Trainer(llama(), args, train_dataset=counting_data(), callbacks=[EndsBy(error, step, after)])
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error
    return trainer


@pytest.mark.combinations(1)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory"), ValueError("of a callback")]
)
def test_a_run_that_ends_by_an_exception_keeps_them(tmp_path, error, after):
    """As in a notebook, where another Trainer follows, with a smaller batch for example."""
    earlier = ended_by(error, tmp_path, after=after)
    expected, beginning = estimates(earlier), Beginning()
    assert {float(state["step"]) for state in optimizer_of(earlier).state.values()} == {2 + after}
    assert with_low_bits(earlier.model) == in_16_bits(earlier.model)
    found = estimates(trained(tmp_path, earlier.model, callbacks=[beginning], optim="adamw_bf16_split", **STILL))
    for name, value in expected.items():
        assert torch.equal(beginning.estimates[name], value), name
        assert torch.equal(found[name], value), name


def test_an_exception_before_the_first_step_leaves_what_the_cast_has_kept(tmp_path):
    earlier, beginning = ended_by(KeyboardInterrupt(), tmp_path, step=1), Beginning()
    trained(tmp_path, earlier.model, callbacks=[beginning], optim="adamw_bf16_split", **STILL)
    exact = dict(llama().named_parameters())
    # A tie that the cast has rounded down is kept as the next smaller number.
    for name, param in exact.items():
        assert ((beginning.estimates[name] - param).abs() <= 2.0**-23 * param.abs()).all(), name


def test_compensations_of_other_weights_are_not_kept(tmp_path, monkeypatch):
    """The weights are those of step 2, or the best ones, and the compensations still those of the last step."""

    def no_space(*args, **kwargs):
        raise OSError("no space left")

    options = {"max_steps": 4, "optim": "adamw_bf16_split", "save_strategy": "steps", "save_steps": 2}
    trainer = trained(tmp_path / "a", **options)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(Trainer, private_apis.LOAD_OPTIMIZER, no_space)
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert not with_low_bits(trainer.model)

    with monkeypatch.context() as patch:
        patch.setattr(callback.LowPrecisionCallback, "on_train_end", no_space)
        patch.setattr(load, "load_low_bits_of_optimizer", lambda *_: None)  # those of the best weights
        best = Trainer(
            llama(),
            arguments(tmp_path / "b", optim="adamw_bf16_split", learning_rate=1e-4, **FIRST_IS_BEST),
            train_dataset=counting_data(),
            eval_dataset=counting_data(16),
        )
        with pytest.raises(OSError, match="no space"):
            best.train()
    assert not with_low_bits(best.model)


def test_an_exception_ends_the_release_of_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1)
    args = {"optim_args": "gradient_release=True", "max_grad_norm": 0}
    trainer = ended_by(KeyboardInterrupt(), tmp_path, after=True, **args)
    before = copy.deepcopy(trainer.model.state_dict())
    row = counting_data(1)[0]["input_ids"][None]
    trainer.model(input_ids=row, labels=row).loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.model.lm_head.weight.grad is not None


class Interrupt(TrainerCallback):
    """Interrupts the backward pass after two steps, at its end, and keeps the optimizer of the run."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.optimizer = optimizer
        if state.global_step == 2:
            self.hook = model.get_input_embeddings().weight.register_hook(self.stop)

    def stop(self, gradient):
        self.hook.remove()
        raise KeyboardInterrupt


@pytest.mark.parametrize("optim_args", ["seed=0", "seed=0,gradient_release=True"])
def test_a_trainer_after_an_interrupted_one_begins_with_its_fp32_weights(tmp_path, optim_args):
    """The optimizer of the first, which a notebook keeps, steps the model no more."""
    model, interrupt, beginning = llama(), Interrupt(), Beginning()
    settings = {"optim": "adamw_bf16_split", "max_grad_norm": 0}
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, model, callbacks=[interrupt], optim_args=optim_args, **settings)
    assert with_low_bits(model) == in_16_bits(model)
    expected = fp32_state_dict(model, interrupt.optimizer)
    later = trained(tmp_path, model, callbacks=[beginning], **settings, **STILL)
    for found in (beginning.estimates, estimates(later)):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
