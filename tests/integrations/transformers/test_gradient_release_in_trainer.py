"""`gradient_release=True` and `offload_states=True` in Trainer: bits and logs of the ordinary step, what is refused."""

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback

import hf_lowprec
from hf_lowprec.integrations.accelerate import private_apis
from hf_lowprec.optim import host_steps
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from tests.support.chosen_cases import nightly_except
from tests.support.optim.simulated_copies import simulate_device
from tests.support.training.tiny_trainer import (
    arguments,
    assert_same_weights,
    counting_data,
    llama,
    logged,
    optimizer_of,
    trained,
)

RELEASED = "gradient_release=True"
DELAYED = "gradient_release=True,clip=delayed"


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 4000)  # of 23,000


def timeless(trainer, without: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """The logs without times, and without some keys."""
    return [
        {
            key: value
            for key, value in entry.items()
            if "runtime" not in key and "second" not in key and key not in without
        }
        for entry in trainer.state.log_history
    ]


class MostAlive(TrainerCallback):
    """The largest share of all gradients that existed at once."""

    def __init__(self):
        self.most = 0.0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        params = list(model.parameters())
        total = sum(param.numel() for param in params)

        def count(grad):
            alive = grad.numel() + sum(param.grad.numel() for param in params if param.grad is not None)
            self.most = max(self.most, alive / total)

        for param in params:
            param.register_hook(count)


@pytest.mark.parametrize(
    "optim",
    nightly_except(
        {"adamw_bf16_kahan", "adafactor_bf16_split"},
        ["adamw_bf16_kahan", "stableadamw_bf16_sr", "muon_bf16_kahan", "adafactor_bf16_split"],
    ),
)
def test_weights_and_logs_are_those_of_the_ordinary_step(tmp_path, optim):
    """With a scheduler, and the precision of logged steps measured as each bucket is stepped."""
    settings = {"optim": optim, "max_grad_norm": 0, "warmup_steps": 3, "logging_steps": 2, "max_steps": 6}
    alive = MostAlive()
    ordinary = trained(tmp_path / "a", **settings)
    released = trained(tmp_path / "b", optim_args=RELEASED, callbacks=[alive], **settings)
    assert_same_weights(ordinary, released)
    assert timeless(ordinary, without=("grad_norm",)) == timeless(released)  # no step needs the norm
    assert len(logged(released, "lost_updates")) == 3
    assert alive.most < 0.35


def test_delayed_clipping_takes_trainers_norm_and_logs_the_steps_own(tmp_path):
    settings = {"optim": "adamw_bf16_kahan", "max_grad_norm": 1e6, "logging_steps": 1, "max_steps": 4}
    unclipped, never = (trained(tmp_path, optim_args=args, **settings) for args in (None, DELAYED))
    assert_same_weights(unclipped, never)
    # FP64 sums of the same squares in another order, rounded to FP32 once
    assert logged(never, "grad_norm") == pytest.approx(logged(unclipped, "grad_norm"), rel=2**-23)
    clipped = trained(tmp_path / "c", optim="adamw_bf16_kahan", optim_args=DELAYED, max_steps=4)
    assert optimizer_of(clipped).max_grad_norm == 1.0  # Trainer's default
    assert not torch.equal(clipped.model.lm_head.weight, never.model.lm_head.weight)


def test_nothing_is_stepped_after_training_until_it_begins_again(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", optim_args=RELEASED, max_grad_norm=0, max_steps=3)
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    tokens = counting_data(1)[0]["input_ids"][None]
    trainer.model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer.model.state_dict().items())
    assert all(param.grad is not None for param in trainer.model.parameters())
    alive = MostAlive()
    trainer.add_callback(alive)
    trainer.model.zero_grad()
    trainer.train()
    assert 0 < alive.most < 0.35


class OutOfMemoryOnce:
    """A hook on the first layer's output that ends the first backward pass when most gradients are final."""

    def __init__(self, model):
        self.raised = False
        model.model.layers[0].register_forward_hook(self._on_output)

    def _on_output(self, layer, inputs, output):
        output.register_hook(self)

    def __call__(self, gradient):
        if not self.raised:
            self.raised = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


@pytest.mark.parametrize("retries", [False, True], ids=["train again", "auto_find_batch_size"])
def test_training_goes_on_after_memory_ran_out_in_a_backward_pass(tmp_path, retries):
    """As if the parameters that the interrupted pass has stepped were all that had a gradient."""
    settings = {
        "optim": "adamw_bf16_split",
        "optim_args": RELEASED,
        "max_grad_norm": 0,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "max_steps": 3,
    }

    def trainer(**options) -> Trainer:
        model = llama()
        OutOfMemoryOnce(model)
        return Trainer(model, arguments(tmp_path, **{**settings, **options}), train_dataset=counting_data())

    released = trainer(auto_find_batch_size=retries)
    if not retries:
        with pytest.raises(torch.OutOfMemoryError):
            released.train()
        released._train_batch_size = 7  # accelerate's next one
    released.train()

    ordinary = trainer(optim_args=None)
    with pytest.raises(torch.OutOfMemoryError):
        ordinary.train()
    steps = [int(optimizer_of(released).state[param]["step"]) for param in released.model.parameters()]
    assert set(steps) == {3, 4}
    for param, count in zip(ordinary.model.parameters(), steps, strict=True):
        if count == 3:
            param.grad = None
    ordinary.optimizer.step()
    ordinary._train_batch_size = 7
    ordinary.train()
    assert_same_weights(ordinary, released)


@pytest.mark.parametrize(
    ("ordinary_args", "more_args", "settings"),
    [
        (None, "", {"gradient_accumulation_steps": 2}),
        (DELAYED, f",{DELAYED}", {"max_grad_norm": 0.5}),
        (None, ",offload_gradients=True", {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}),
    ],
    ids=str,
)
def test_offloaded_states_give_the_weights_logs_and_checkpoints_of_the_ordinary_step(
    tmp_path, capsys, caplog, monkeypatch, ordinary_args, more_args, settings
):
    """`offload_states=True`, on a simulated device."""
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", 4000)
    settings |= {"optim": "adamw_bf16_split", "max_steps": 4, "logging_steps": 1}
    settings |= {"save_steps": 2, "save_strategy": "steps"}
    ordinary = trained(tmp_path / "a", optim_args=ordinary_args, **settings)
    simulate_device(monkeypatch)
    capsys.readouterr()
    optim_args = f"offload_states=True{more_args}"
    offloaded = trained(tmp_path / "b", optim_args=optim_args, **settings)
    moved = "states and gradients" if "offload_gradients" in optim_args else "states"
    assert f", {moved} in host memory" in capsys.readouterr().out
    resumed = [
        trained(tmp_path / f"from_{run}", resume=str(tmp_path / run / "checkpoint-2"), optim_args=args, **settings)
        for run, args in (("a", optim_args), ("b", ordinary_args))
    ]
    for other in (offloaded, *resumed):
        assert_same_weights(ordinary, other)
    assert timeless(ordinary) == timeless(offloaded)
    assert logged(ordinary, "grad_norm")
    assert not caplog.messages  # such as that weights have no gradients


# What is refused, before anything is changed.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optim_args": RELEASED},
            r"max_grad_norm=1\.0 \(Trainer's default is 1\.0\).*\(optim='stableadamw_bf16_kahan' clips.*clip=delayed",
        ),
        (
            {"optim_args": RELEASED, "max_grad_norm": 0, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2 accumulates gradients.*gradient_checkpointing",
        ),
        ({"optim_args": DELAYED, "max_grad_norm": 0}, "clip='delayed' needs max_grad_norm"),
        (
            {"optim_args": RELEASED + ",grad_accumulation=fp32", "max_grad_norm": 0},
            "grad_accumulation='fp32' adds to gradients in param.grad",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_training(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, optim="adamw_bf16_kahan", **settings)


def test_an_optimizer_that_is_handed_over_is_checked_when_training_begins(tmp_path):
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0.*\(hf_lowprec\.StableAdamW clips"):
        trained(
            tmp_path,
            optimizer_cls_and_kwargs=hf_lowprec.optimizer_factory("adamw_bf16_kahan", gradient_release=True),
            callbacks=[hf_lowprec.LowPrecisionCallback()],
        )


def test_an_accelerator_that_accumulates_is_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    hf_lowprec.prepare_accelerator(accelerator)
    model = llama()
    with pytest.raises(ValueError, match=r"Accelerator\(gradient_accumulation_steps=2\) cannot accumulate"):
        accelerator.prepare(model, hf_lowprec.AdamW(model.parameters(), gradient_release=True))
    assert private_apis.prepared_optimizers(accelerator) == []


def test_an_accelerator_cannot_clip_by_a_norm_of_released_gradients():
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    model = llama()
    model, _optimizer = accelerator.prepare(model, hf_lowprec.AdamW(model.parameters(), gradient_release=True))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(1\.0\): .*StableAdamW"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert accelerator.clip_grad_norm_(model.parameters(), float("inf")) is None
