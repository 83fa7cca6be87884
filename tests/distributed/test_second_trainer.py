"""A Trainer on several ranks begins with the FP32 weights that an earlier training of its model has ended with."""

import tempfile

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import hf_lowprec
from hf_lowprec.reduction import check_replicas
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from hf_lowprec.rounding.nearest import spacing
from tests.scripts.trainer_ranks import llama, text
from tests.support.processes.ranks import on_ranks
from tests.support.training.fp32_weights_at_start import Beginning
from tests.support.training.tiny_trainer import arguments, optimizer_of

BF16 = torch.bfloat16
Weights = dict[str, torch.Tensor]


def train(
    model: LlamaForCausalLM, optim: str, learning_rate: float, *callbacks: TrainerCallback
) -> tuple[Weights, Weights]:
    """Train two steps on batches that differ from rank to rank.

    Returns:
        The FP32 estimates before and afterwards.
    """
    beginning = Beginning()
    args = arguments(
        tempfile.gettempdir(), optim=optim, learning_rate=learning_rate, max_steps=2, per_device_train_batch_size=2
    )
    trainer = Trainer(model, args, train_dataset=text(16), callbacks=[beginning, *callbacks])
    trainer.train()
    assert trainer.args.world_size > 1
    check_replicas(trainer.model, trainer.optimizer)
    return beginning.estimates, hf_lowprec.fp32_state_dict(trainer.model, optimizer_of(trainer))


def train_in_own_loop(model: LlamaForCausalLM) -> Weights:
    """Train two steps with split weights; return the FP32 estimates afterwards."""
    hf_lowprec.cast_model(model)
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3, rounding="split")
    prepared, wrapped = accelerator.prepare(model, optimizer)
    for row in text(4)[accelerator.process_index :: 2]:
        tokens = row["input_ids"][None]
        accelerator.backward(prepared(input_ids=tokens, labels=tokens).loss)
        wrapped.step()
        wrapped.zero_grad()
    hf_lowprec.keep_low_bits(wrapped)
    return hf_lowprec.fp32_state_dict(model, optimizer)


def check_second(model: LlamaForCausalLM, first: str, second: str) -> None:
    """Train with both. The second has a learning rate of 0, so it also ends with what its states can hold of that."""
    end_of_first = train_in_own_loop(model) if first == "loop" else train(model, first, 1e-3)[1]
    for name, param in model.named_parameters():
        assert (attached_low_bits(param) is not None) == (param.dtype == BF16), name
    beginning, end = train(model, second, 0.0)
    beyond_16_bits = 0  # weights that are no 16-bit numbers
    for name, value in end_of_first.items():
        assert torch.equal(beginning[name], value), name
        lost = 2.0**-8 * spacing(value, BF16) if second.endswith("kahan") and "norm" not in name else 0.0
        assert ((end[name] - value).abs() <= lost).all(), name
        beyond_16_bits += int((value != value.to(BF16)).sum()) if "norm" not in name else 0
    assert beyond_16_bits > 0


class Interrupted(TrainerCallback):
    """Ends a run on every rank."""

    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def check_after_an_exception(model: LlamaForCausalLM, optim: str) -> None:
    """Nothing is kept: to read the weights would be to wait for other ranks, which may be gone."""
    with pytest.raises(KeyboardInterrupt):
        train(model, optim, 1e-3, Interrupted())
    assert all(attached_low_bits(param) is None for param in model.parameters())


def check(first: str, second: str) -> None:
    """Train twice, by names of optimizers; the first may be "loop", for a loop of one's own."""
    for model in (llama(), llama().to(BF16)):  # with low bits, and from zero
        check_second(model, first, second)
    check_after_an_exception(llama(), second)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("adamw_bf16_split", "adamw_bf16_split"),
        pytest.param("adamw_bf16_split", "adamw_bf16_kahan", marks=pytest.mark.every_case),
        pytest.param("loop", "adamw_bf16_split", marks=pytest.mark.every_case),
    ],
)
def test_a_second_trainer_under_ddp_begins_where_the_first_training_has_ended(first, second):
    on_ranks(check, 2, first, second)
