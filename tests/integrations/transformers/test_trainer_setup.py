"""When a Trainer casts its model: while it is built, and before it builds its optimizer; not when asked for one."""

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_lowprec.casting.earlier_casts import cast_dtypes
from tests.support.training.tiny_trainer import arguments, assert_pure_bf16, counting_data, llama

BF16, FP32 = torch.bfloat16, torch.float32


def test_asking_for_an_optimizer_does_not_cast(tmp_path):
    model = llama().to(BF16)
    Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim="adamw_bf16_kahan"), model)
    assert not cast_dtypes(model)
    assert {param.dtype for param in model.parameters()} == {BF16}, "norms too"


class AsksTrainer(Trainer):
    """Never calls the method that it overrides."""

    def create_optimizer(self, model=None):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(self.args, model or self.model)
        self.optimizer = cls([p for p in self.model.parameters() if p.requires_grad], **kwargs)
        return self.optimizer


@pytest.mark.parametrize("trainer_cls", [Trainer, AsksTrainer])
@pytest.mark.parametrize("pass_model", [False, True])
def test_what_was_added_since_is_cast_before_the_optimizer_is_built(tmp_path, trainer_cls, pass_model):
    args = arguments(tmp_path, optim="adamw_bf16_kahan", optim_args="keep_fp32=kept")
    model = llama()
    model.kept = nn.Linear(4, 4)
    trainer = trainer_cls(model, args, train_dataset=counting_data())
    trainer.model.adapter, trainer.model.part = nn.Linear(4, 4), nn.Module()
    trainer.model.part.kept = nn.Linear(4, 4)
    trainer.create_optimizer(*[trainer.model] * pass_model)
    assert {param.dtype for param in trainer.model.adapter.parameters()} == {BF16}
    assert {param.dtype for param in trainer.model.kept.parameters()} == {FP32}
    assert {param.dtype for param in trainer.model.part.parameters()} == {FP32}, "optim_args hold for it as well"
    held = {id(param) for group in trainer.optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in trainer.model.parameters()}


def test_an_optimizer_that_exists_leaves_the_model_as_it_is(tmp_path):
    args = arguments(tmp_path, optim="adamw_bf16_kahan")
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(model, args, train_dataset=counting_data(), optimizers=(optimizer, None))
    trainer.model.adapter = nn.Linear(4, 4)
    assert trainer.create_optimizer() is optimizer
    assert trainer.model.adapter.weight.dtype == FP32


def test_a_16_bit_model_is_cast_also_if_its_optimizer_is_chosen_late(tmp_path):
    trainer = Trainer(llama().to(BF16), arguments(tmp_path), train_dataset=counting_data())
    trainer.args.optim = "adamw_bf16_kahan"
    trainer.create_optimizer()
    assert_pure_bf16(trainer.model)
