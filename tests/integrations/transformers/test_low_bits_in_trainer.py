"""Low bits under Trainer: FP32 models start with them, every end of a run keeps them, a second Trainer gets them."""

import functools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

import hf_lowprec
from hf_lowprec import export_checkpoint, fp32_state_dict
from hf_lowprec.integrations.transformers import callback, private_apis
from hf_lowprec.integrations.transformers.checkpoints import load
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.state.saved_formats import LOW_BITS
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from hf_lowprec.rounding.nearest import spacing
from tests.support.chosen_cases import nightly_except
from tests.support.rounding.kept_low_bits import kept_values
from tests.support.training.tiny_trainer import (
    LOAD_BEST,
    arguments,
    assert_same,
    assert_same_weights,
    counting_data,
    llama,
    optimizer_of,
    trained,
)

BF16 = torch.bfloat16
KAHAN = {"optim": "adamw_bf16_kahan"}
STILL = {"learning_rate": 0.0, "max_steps": 1}
"""A first step that creates the states and moves nothing."""
FIRST_IS_BEST = {**LOAD_BEST, "max_steps": 8, "metric_for_best_model": "loss", "greater_is_better": True}
"""Of two checkpoints, the first is loaded in the end: losses fall."""


def estimates(trainer) -> dict[str, torch.Tensor]:
    return fp32_state_dict(trainer.model, optimizer_of(trainer))


def with_low_bits(model) -> set[str]:
    return {name for name, param in model.named_parameters() if attached_low_bits(param) is not None}


def in_16_bits(model) -> dict[str, int]:
    """The trainable 16-bit parameters, with their numbers of elements."""
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad and p.dtype == BF16}


def initial_values(printed: str) -> dict[str, int]:
    """The kinds of initial compensations in the report, with their numbers of elements."""
    (line,) = re.findall(r"(?:compensation|remainder) +starts with (.*)", printed)
    return {kind: int(count.replace(",", "")) for kind, count in re.findall(r"([a-z ]+?) ([\d,]+)(?:, |$)", line)}


def exported(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The FP32 weights that an export of a checkpoint contains."""
    export_checkpoint(checkpoint, checkpoint.parent / "exported")
    return load_file(checkpoint.parent / "exported" / "model.safetensors")


class FirstStep(TrainerCallback):
    """Keeps the FP32 estimates before the first step, and which parameters have low bits before and after it."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.estimates, self.with_low_bits = fp32_state_dict(model, optimizer), with_low_bits(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.with_low_bits_later = {name for name, param in model.named_parameters() if "_low_bits" in vars(param)}


@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("how", ["model", "model_init"])
def test_an_fp32_model_starts_with_its_low_bits(tmp_path, capsys, how, optim):
    first, exact = FirstStep(), llama().state_dict()
    source = {"model_init": functools.partial(llama, 0)} if how == "model_init" else {"model": llama()}
    trainer = trained(tmp_path, **source, callbacks=[first], max_steps=2, optim=optim)
    assert initial_values(capsys.readouterr().out) == {"low bits": sum(in_16_bits(trainer.model).values())}
    for name, weights in exact.items():
        assert torch.equal(first.estimates[name], weights if "norm" in name else kept_values(weights)), name
    assert first.with_low_bits == in_16_bits(trainer.model).keys()
    assert not first.with_low_bits_later


def test_what_starts_otherwise(tmp_path, capsys):
    """A model in BF16, a mode without a compensation, and a resumed run."""
    model = trained(tmp_path, llama().to(BF16), max_steps=2, save_strategy="steps", save_steps=1, **KAHAN).model
    count = sum(in_16_bits(model).values())
    assert initial_values(capsys.readouterr().out) == {"zero": count}
    trained(tmp_path, resume=str(tmp_path / "checkpoint-1"), max_steps=2, **KAHAN)
    assert initial_values(capsys.readouterr().out) == {"values of a checkpoint or of earlier steps": count}
    first = FirstStep()
    trained(tmp_path, max_steps=1, callbacks=[first], optim="adamw_bf16_sr")
    assert not first.with_low_bits and "starts with" not in capsys.readouterr().out


def test_adapters_in_fp32_have_low_bits(tmp_path, capsys):
    """LoRA's B starts at zero, in FP32 as in 16 bits: no low bits."""
    adapters = pytest.importorskip("tests.support.training.peft_adapters")
    first, model = FirstStep(), adapters.adapted("lora")
    exact = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer = trained(tmp_path, model, max_steps=1, learning_rate=0.0, callbacks=[first], **KAHAN)
    count = sum(weights.numel() for name, weights in exact.items() if "lora_A" in name)
    assert initial_values(capsys.readouterr().out)["low bits"] == count
    for found in (first.estimates, estimates(trainer)):
        for name, weights in exact.items():
            assert ((found[name] - weights).abs() <= 2.0**-16 * weights.abs()).all(), name


def test_an_optimizer_that_was_passed_decides(tmp_path):
    for name, keeps in (("adamw_bf16_kahan", True), ("adamw_bf16_sr", False)):
        factory, first = hf_lowprec.optimizer_factory(name, lr=1e-3), FirstStep()
        callbacks = [hf_lowprec.LowPrecisionCallback(), first]
        trained(tmp_path, max_steps=1, optimizer_cls_and_kwargs=factory, callbacks=callbacks)
        assert bool(first.with_low_bits) == keeps


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
    assert_same_weights(*(trained(tmp_path, each, **options) for each in (model, copied)))
    assert not hasattr(model, "_original_forward")


@pytest.mark.parametrize("second", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("first", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("loaded_in", ["FP32", "BF16"])
def test_a_second_trainer_begins_with_the_fp32_weights_of_the_first(tmp_path, capsys, loaded_in, first, second):
    model = llama() if loaded_in == "FP32" else llama().to(BF16)
    earlier = trained(tmp_path, model, max_steps=3, learning_rate=1e-4, optim=first)
    assert LOW_BITS not in optimizer_of(earlier).state_dict()
    assert not any(vars(value) for value in model.state_dict().values()), "nothing of them is saved with the model"
    expected, beginning = estimates(earlier), FirstStep()
    del earlier
    capsys.readouterr()
    assert with_low_bits(model) == in_16_bits(model).keys()
    later = trained(tmp_path, model, callbacks=[beginning], optim=second, **STILL)
    assert "starts with low bits" in capsys.readouterr().out
    found = estimates(later)
    for name, value in expected.items():
        assert torch.equal(beginning.estimates[name], value), name
        # A BF16 compensation holds 8 bits of what is half a spacing at most.
        lost = 2.0**-9 * spacing(value, BF16) if second.endswith("kahan") and "norm" not in name else 0.0
        assert ((found[name] - value).abs() <= lost).all(), name
    assert any((value != value.to(BF16)).any() for name, value in expected.items() if "norm" not in name)


def test_the_same_trainer_goes_on_with_its_optimizer(tmp_path):
    """The second `train()` does not notice that low bits were kept."""
    trainers = [trained(tmp_path, max_steps=3, **KAHAN) for _ in range(2)]
    for param in trainers[1].model.parameters():
        vars(param).pop("_low_bits", None)
    for trainer in trainers:
        trainer.train()
        assert with_low_bits(trainer.model) == in_16_bits(trainer.model).keys()
    assert_same(*trainers)
    head = trainers[0].model.lm_head.weight  # the FP32 sum of two BF16 numbers of close exponents is exact
    exact = head.detach().float() + attached_low_bits(head).float()
    assert torch.equal(estimates(trainers[0])["lm_head.weight"], exact)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", "adamw_bf16_split"])
@pytest.mark.parametrize("loaded_in", ["FP32", "BF16"])
def test_the_best_weights_are_fp32_weights_too(tmp_path, loaded_in, optim):
    """After `load_best_model_at_end`, the weights are those that an export of the best checkpoint contains."""
    model = llama() if loaded_in == "FP32" else llama().to(BF16)
    trainer = trained(tmp_path, model, optim=optim, **FIRST_IS_BEST)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert with_low_bits(model) == in_16_bits(model).keys()
    found, expected, beginning = estimates(trainer), exported(tmp_path / "checkpoint-4"), FirstStep()
    del trainer
    trained(tmp_path / "second", model, callbacks=[beginning], optim=optim, **STILL)
    for weights in (found, beginning.estimates):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("first", nightly_except({"split", "kahan"}, ["stochastic", "split", "kahan"]))
def test_the_best_weights_of_an_earlier_rounding_mode_are_fp32_weights_too(tmp_path, first):
    """A remainder holds what a compensation does; the reverse rounds it to the 8 bits of a BF16 number."""
    schedule = f"rounding={first}:0.5|{'kahan' if first == 'split' else 'split'}"
    trainer = trained(tmp_path, optim="adamw_bf16_split", optim_args=schedule, **FIRST_IS_BEST)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    found, differences = estimates(trainer), 0
    for name, value in exported(tmp_path / "checkpoint-4").items():
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
    trainer = trained(tmp_path, callbacks=[Damage()], save_only_model=save_only_model, **KAHAN, **FIRST_IS_BEST)
    assert not with_low_bits(trainer.model)
    assert f"the best weights, from {tmp_path / 'checkpoint-4'}, were loaded in 16 bits, as stored" in caplog.text
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
    assert with_low_bits(trainer.model) == in_16_bits(trainer.model).keys()
    found = estimates(trainer)["lm_head.weight"]
    assert not torch.equal(found, found.to(BF16).float())
    assert "best weights" not in caplog.text


class EndsBy(TrainerCallback):
    """Raises an exception in the forward pass of a step, at the end of its backward pass, or after it."""

    def __init__(self, error: BaseException, when: str, step: int) -> None:
        self.error, self.when, self.step = error, when, step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step and self.when == "forward":
            self.hook = model.lm_head.register_forward_pre_hook(self._raise)
        elif state.global_step + 1 == self.step and self.when == "backward":
            self.hook = model.get_input_embeddings().weight.register_hook(self._raise)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.when == "after":
            raise self.error

    def _raise(self, *args):
        self.hook.remove()
        raise self.error


def ended_by(error: BaseException, tmp_path, when: str = "forward", step: int = 3, **settings) -> Trainer:
    """A Trainer whose run has raised `error`."""
    args = arguments(tmp_path, learning_rate=1e-4, optim="adamw_bf16_split", max_grad_norm=0, **settings)
    trainer = Trainer(llama(), args, train_dataset=counting_data(), callbacks=[EndsBy(error, when, step)])
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error
    return trainer


@pytest.mark.combinations(1)
@pytest.mark.parametrize("optim_args", [None, "gradient_release=True"])
@pytest.mark.parametrize("when", ["forward", "backward", "after"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory"), ValueError("of a callback")]
)
def test_a_run_that_ends_by_an_exception_keeps_them(tmp_path, error, when, optim_args):
    """As in a notebook, where another Trainer follows, and the optimizer of the first steps the model no more."""
    earlier, beginning = ended_by(error, tmp_path, when, optim_args=optim_args), FirstStep()
    expected = estimates(earlier)
    stepped = {2, 3} if optim_args and when == "backward" else {3 if when == "after" else 2}
    assert {float(state["step"]) for state in optimizer_of(earlier).state.values()} <= stepped
    assert with_low_bits(earlier.model) == in_16_bits(earlier.model).keys()
    settings = {"callbacks": [beginning], "optim": "adamw_bf16_split", **STILL}
    found = estimates(trained(tmp_path, earlier.model, **settings))
    for name, value in expected.items():
        assert torch.equal(beginning.estimates[name], value), name
        assert torch.equal(found[name], value), name


def test_an_exception_before_the_first_step_leaves_what_the_cast_has_kept(tmp_path):
    earlier, beginning = ended_by(KeyboardInterrupt(), tmp_path, step=1), FirstStep()
    trained(tmp_path, earlier.model, callbacks=[beginning], optim="adamw_bf16_split", **STILL)
    # A tie that the cast has rounded down is kept as the next smaller number.
    for name, param in llama().named_parameters():
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

    model = llama()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(callback.LowPrecisionCallback, "on_train_end", no_space)
        patch.setattr(load, "load_low_bits_of_optimizer", lambda *_: None)  # those of the best weights
        trained(tmp_path / "b", model, optim="adamw_bf16_split", learning_rate=1e-4, **FIRST_IS_BEST)
    assert not with_low_bits(model)


def test_an_exception_ends_the_release_of_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1)
    trainer = ended_by(KeyboardInterrupt(), tmp_path, "after", optim_args="gradient_release=True")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    row = counting_data(1)[0]["input_ids"][None]
    trainer.model(input_ids=row, labels=row).loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.model.lm_head.weight.grad is not None
