"""The rows of the estimate are the bytes that training then holds, and the memory of a step is that of real steps."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from hf_lowprec.optim import AdamW, LowPrecisionOptimizer, Muon
from hf_lowprec.optim.step import orthogonalization, whole_tensor_quantities
from hf_lowprec.reduction import GradientAccumulator
from hf_lowprec.reduction.grad_accumulation import accumulator_bytes
from hf_lowprec.tools.estimate.activations import LiveMemory
from hf_lowprec.tools.estimate.memory import fp32_row, low_precision_row, step_peak
from tests.support.training.peak_allocation import peak_allocation
from tests.support.training.tiny_trainer import arguments, counting_data, llama

BF16 = torch.bfloat16
SHAPES = [(256, 256), (384, 128), (128, 384), (2, 64, 96), (300,)]


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


def built(device: str, **options) -> Muon:
    params = [torch.nn.Parameter(torch.ones(shape, dtype=BF16, device=device)) for shape in SHAPES]
    return Muon(params, matrices=params[:-1], **options)


def give_gradients(optimizer: LowPrecisionOptimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape).to(param.dtype)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("state_dtype", [None, torch.int8])
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_the_peak_of_a_step_is_what_the_allocator_hands_out(rounding, state_dtype, clip):
    """Within 3%: tables are not counted. At these sizes the FP32 values of a chunk are most of it."""
    options = {"rounding": rounding, "state_dtype": state_dtype}
    optimizer = built("cpu", max_grad_norm=clip, backend="native", **options)
    give_gradients(optimizer)
    optimizer.step()
    give_gradients(optimizer)
    found = peak_allocation(optimizer.step)
    assert step_peak(built("meta", **options), clipped=clip is not None) == pytest.approx(found, rel=0.03)


def test_of_large_matrices_it_is_that_of_newton_schulz(monkeypatch):
    """FP32 values of few elements: 8 bytes per element of a square matrix, and its tables.

    Counted by tensors, since matrix products on a CPU take scratch memory.
    """
    for module in (orthogonalization, whole_tensor_quantities):
        monkeypatch.setattr(module, "CHUNK", 1000)
    optimizer = built("cpu", backend="native")
    give_gradients(optimizer)
    optimizer.step()
    give_gradients(optimizer)
    with LiveMemory() as memory:
        optimizer.step()
    expected = step_peak(built("meta"), clipped=False)
    assert expected == pytest.approx(8 * 256 * 256, rel=0.01)
    assert memory.peak == pytest.approx(expected, rel=0.03)


def test_other_optimizers_step_in_place():
    assert step_peak(AdamW([torch.nn.Parameter(torch.ones(9, 9, device="meta"))])) == 0
