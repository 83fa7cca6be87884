"""`optim_args="max_grad_norm=…,skip_nonfinite=True"` with the stock Trainer."""

import math

import pytest
import torch
from transformers import TrainerCallback

import hf_lowprec  # noqa: F401
from tests.support.training.tiny_trainer import assert_same, logged, losses, optimizer_of, trained


class Watch(TrainerCallback):
    """Keeps the exact norm of the gradients as Trainer hands them to the optimizer."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))


class Poison(TrainerCallback):
    """Puts an infinity into a gradient before the optimizer's third step, before Trainer asks for the norm."""

    def __init__(self):
        self.backwards = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def hook(grad):
            self.backwards += 1
            return torch.full_like(grad, math.inf) if self.backwards == 3 else grad

        next(model.parameters()).register_hook(hook)


def test_the_norm_before_clipping_is_reported_and_the_step_clips(tmp_path):
    """Trainer's own argument gives the same bits as the optimizer's, and no gradient is touched."""
    settings = {"optim": "adamw_bf16_kahan", "logging_steps": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainers = []
    for argument in ({"optim_args": "max_grad_norm=0.05"}, {"max_grad_norm": 0.05}):
        watch = Watch()
        trainers.append(trained(tmp_path, callbacks=[watch], **argument, **settings))
        assert min(watch.norms) > 0.05  # Trainer itself clipped nothing
        # Squares are summed in FP64 and the norm rounded to FP32 once.
        assert logged(trainers[-1], "grad_norm") == pytest.approx(watch.norms, rel=2**-24)
        assert logged(trainers[-1], "skipped_steps") == []
    assert trainers[0].args.max_grad_norm == optimizer_of(trainers[0]).max_grad_norm == 0.05
    assert_same(*trainers)


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.0}, {"optim_args": "max_grad_norm=0"}])
def test_zero_does_not_clip_and_the_norm_is_still_reported(tmp_path, settings):
    unclipped = trained(tmp_path / "a", optim="adamw_bf16_kahan", logging_steps=1, max_steps=4, **settings)
    assert unclipped.args.max_grad_norm == 0 and optimizer_of(unclipped).max_grad_norm is None
    clipped = trained(tmp_path / "b", optim="adamw_bf16_kahan", max_grad_norm=1e6, max_steps=4)
    assert all(norm > 0 for norm in logged(unclipped, "grad_norm"))
    assert_same(unclipped, clipped)


def test_a_step_with_infinite_gradients_is_left_out_and_logged(tmp_path):
    poison = Poison()
    trainer = trained(
        tmp_path,
        optim="adamw_bf16_sr",
        optim_args="skip_nonfinite=True,max_grad_norm=1.0",
        callbacks=[poison],
        logging_steps=1,
    )
    steps = trainer.state.max_steps
    assert poison.backwards == steps
    assert logged(trainer, "skipped_steps") == [0, 0, *[1] * (steps - 2)]
    assert math.isinf(logged(trainer, "grad_norm")[2])
    assert all(map(math.isfinite, losses(trainer)))
    assert all(param.isfinite().all() for param in trainer.model.parameters())
    assert {float(state["step"]) for state in optimizer_of(trainer).state.values()} == {steps - 1}


def test_the_count_of_a_resumed_run_goes_on(tmp_path):
    options = {"optim": "adamw_bf16_sr", "optim_args": "skip_nonfinite=True", "max_steps": 8, "logging_steps": 1}
    options |= {"save_strategy": "steps", "save_steps": 4}
    trained(tmp_path, callbacks=[Poison()], **options)
    resumed = trained(tmp_path, callbacks=[Poison()], resume=str(tmp_path / "checkpoint-4"), **options)
    assert logged(resumed, "skipped_steps") == [0, 0, 1, 1, 1, 1, 2, 2]
