"""The rows of the estimate are the bytes that training then holds."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from hf_lowprec.reduction import GradientAccumulator
from hf_lowprec.reduction.grad_accumulation import accumulator_bytes
from hf_lowprec.tools.estimate.rows import fp32_row, low_precision_row
from tests.support.training.tiny_trainer import arguments, counting_data, llama


class GradientBytes(TrainerCallback):
    """Counts the bytes that exist when a step begins."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.nbytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("adamw_bf16_sr", "keep_fp32=lm_head"),
        ("adamw_bf16_kahan", "state_dtype=exp_avg_sq:float32,amsgrad=True"),
        ("adamw_bf16_split", "state_dtype=int8"),
        ("sgd_bf16_kahan", "momentum=0.9"),
        ("muon_bf16_kahan", None),
        ("adan_bf16_sr", "state_dtype=exp_avg:int8|exp_avg_sq:int8"),
    ],
)
def test_they_foretell_what_training_holds(tmp_path, optim, optim_args):
    gradients = GradientBytes()
    args = arguments(tmp_path, optim=optim, optim_args=optim_args, max_steps=1)
    trainer = Trainer(llama(), args, train_dataset=counting_data(8), callbacks=[gradients])
    trainer.train()
    states = (tensors.items() for tensors in trainer.optimizer.optimizer.state.values())
    state = sum(value.nbytes for items in states for name, value in items if name != "step")
    with torch.device("meta"):
        model = LlamaForCausalLM(llama().config)
    memory = low_precision_row(model, optim, optim_args).memory
    assert memory.weights.total() == sum(p.nbytes for p in trainer.model.parameters())
    assert memory.gradients.total() == gradients.nbytes
    assert memory.state.total() == state


def linear() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(100, 10)


def test_sums_of_micro_batches_are_not_sharded():
    row = low_precision_row(linear(), "adamw_bf16_sr", "grad_accumulation=fp32", gpus=4)
    assert row.accumulation == 4 * 1010
    assert row.per_gpu(4) == 8 * 1010 / 4 + 4 * 1010


def test_whole_gradients_stay_where_fsdp2_adds_up_micro_batches():
    rows = [fp32_row(linear(), 4, steps) for steps in (1, 2)]
    rows += [low_precision_row(linear(), "adamw_bf16_sr", None, 4, steps) for steps in (1, 2)]
    assert [row.per_gpu(4) / 1010 for row in rows] == [16 / 4, 16 / 4 + 4, 8 / 4, 8 / 4 + 2]


def test_frozen_parameters_have_neither_gradient_nor_state():
    with torch.device("meta"):
        models = [nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 10)) for _ in range(2)]
    for model in models:
        model[0].requires_grad_(False)
    rows = [fp32_row(models[0]), low_precision_row(models[1], "adamw_bf16_kahan", None)]
    assert [row.total() for row in rows] == [4 * 190 + 12 * 100, 2 * 190 + 8 * 100]


def test_bytes_of_fp32_sums_are_those_held():
    model = nn.ModuleDict({"linear": nn.Linear(5, 3).bfloat16(), "norm": nn.LayerNorm(3)})
    model["frozen"] = nn.Linear(2, 2).bfloat16().requires_grad_(False)
    expected = accumulator_bytes(model.parameters())
    assert expected == 18 * 4 + 6 * 8
    sums = GradientAccumulator(model)
    for _ in range(2):
        hidden: Tensor = model["linear"](torch.ones(1, 5, dtype=torch.bfloat16)).float()
        with sums.active():
            model["norm"](hidden).square().sum().backward()
    assert sums.nbytes == expected
