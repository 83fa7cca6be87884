"""Low bits that a cast keeps: which parameters have them, how long, and what they cost."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.optim import AdamW
from hf_lowprec.rounding.attached_low_bits import attach_rounded_off, attached_low_bits, remove_low_bits
from hf_lowprec.rounding.low_bits import fp32_value
from tests.support.rounding.kept_low_bits import kept_values

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Model(nn.Module):
    """One tensor of each kind that a cast meets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.in_fp64 = nn.Parameter(torch.randn(3, dtype=FP64))
        self.in_bf16 = nn.Parameter(torch.randn(3).to(BF16))
        self.few_digits = nn.Parameter(torch.tensor([1.0, 0.5, -3.0]))
        self.register_buffer("table", torch.randn(3))


def cast(dtype: torch.dtype = BF16) -> tuple[dict[str, torch.Tensor], Model, hf_lowprec.CastReport]:
    """FP32 copies of the weights before, the cast model, and the report."""
    model = Model()
    with torch.no_grad():
        model.norm.weight.normal_()
    exact = {name: param.detach().clone() for name, param in model.named_parameters()}
    return exact, model, hf_lowprec.cast_model(model, dtype)


def kept(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if attached_low_bits(param) is not None}


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_trainable_fp32_parameters_that_are_cast_have_low_bits(dtype):
    """Not norms, which stay FP32, nor what is frozen, FP64, 16 bits already, or a 16-bit number in FP32."""
    exact, model, report = cast(dtype)
    assert kept(model) == set(report.low_bits) == {"linear.weight", "linear.bias"}
    assert "low bits of 2 tensors kept for the optimizer" in str(report)
    for name in kept(model):
        param = model.get_parameter(name)
        low = attached_low_bits(param)
        assert (low.dtype, low.shape) == ({BF16: torch.int16, FP16: BF16}[dtype], param.shape)
        if dtype is BF16:
            assert torch.equal(fp32_value(param, low), exact[name])
        else:  # 12 bits of the weight, ties included, and 8 of the rest, the last of them truncated at worst
            assert ((param.double() + low.double() - exact[name].double()).abs() <= 2.0**-19 * exact[name].abs()).all()
        assert not torch.equal(param.double(), exact[name].double())


def test_weights_of_an_fp16_checkpoint_have_low_bits_in_bf16():
    """FP16 has three bits more than BF16, and split weights hold them; BF16 has no digit that FP16 lacks."""
    for loaded, dtype, expected in ((FP16, BF16, {"linear.weight", "linear.bias"}), (BF16, FP16, set())):
        model = nn.Sequential()
        torch.manual_seed(0)
        model.linear = nn.Linear(7, 5).to(loaded)
        exact = {name: param.detach().float() for name, param in model.named_parameters()}
        report = hf_lowprec.cast_model(model, dtype)
        assert kept(model) == set(report.low_bits) == expected
        for name in expected:
            param = model.get_parameter(name)
            assert not torch.equal(param.float(), exact[name])
            # Every eighth number is a tie. Those that the cast has rounded down are kept as the next smaller number.
            error = (fp32_value(param, attached_low_bits(param)) - exact[name]).abs()
            assert (error <= 2.0**-23 * exact[name].abs()).all()


def test_a_cast_can_be_told_to_keep_none():
    model = Model()
    assert not hf_lowprec.cast_model(model, keep_low_bits=False).low_bits
    assert not kept(model)


def test_a_model_on_the_meta_device_has_none():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    assert not hf_lowprec.cast_model(model).low_bits
    assert not kept(model)


def test_a_second_cast_leaves_them():
    _, model, _ = cast()
    before = {name: attached_low_bits(model.get_parameter(name)).clone() for name in kept(model)}
    hf_lowprec.cast_model(model)
    assert kept(model) == before.keys()
    assert all(torch.equal(attached_low_bits(model.get_parameter(name)), value) for name, value in before.items())


@pytest.mark.parametrize("change", ["loaded", "added to", "permuted", "one element", "another shape", "another dtype"])
def test_low_bits_of_other_weights_do_not_count(change):
    _, model, _ = cast()
    weight = model.linear.weight
    assert attached_low_bits(weight) is not None
    with torch.no_grad():
        if change == "loaded":
            model.load_state_dict({**model.state_dict(), "linear.weight": torch.randn(5, 7).to(BF16)})
        elif change == "added to":
            weight.mul_(2)
        elif change == "permuted":
            weight.copy_(weight.flip(0))
        elif change == "one element":
            weight[4, 6] += 1
        elif change == "another shape":
            weight.data = weight.data[:2]
        else:
            weight.data = weight.data.float()
    assert attached_low_bits(weight) is None
    assert attached_low_bits(model.linear.bias) is not None


@pytest.mark.parametrize("way", ["same weights loaded", "moved", "pickled"])
def test_they_stay_with_equal_weights(way):
    """`model.to(device)` sets `param.data`, as `_apply` does here."""
    _, model, _ = cast()
    before = attached_low_bits(model.linear.weight).clone()
    if way == "same weights loaded":
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    elif way == "moved":
        model._apply(lambda tensor: tensor.clone())
    else:
        model = pickle.loads(pickle.dumps(model))
    assert torch.equal(attached_low_bits(model.linear.weight), before)


def test_a_deepcopied_model_has_none():
    """torch copies no attributes of parameters, so that reference models cost nothing."""
    _, model, _ = cast()
    copied = copy.deepcopy(model)
    assert not kept(copied)


def test_memory_is_two_bytes_per_parameter_until_the_first_step():
    """Nothing afterwards; parameters without a gradient keep theirs, which are their digits, until they get one."""
    _, model, _ = cast()
    optimizer = AdamW([model.linear.weight, model.linear.bias])
    memory = attached_low_bits(model.linear.weight).untyped_storage()
    assert memory.nbytes() == 2 * model.linear.weight.numel()
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    optimizer.step()
    assert "_low_bits" not in vars(model.linear.weight)
    assert attached_low_bits(model.linear.bias) is not None
    model.linear.bias.grad = torch.ones_like(model.linear.bias)
    optimizer.step()
    assert not any("_low_bits" in vars(param) for param in model.parameters())
    states = optimizer.state[model.linear.weight]
    assert {name: value.nbytes for name, value in states.items() if name != "step"} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "remainder"), 2 * model.linear.weight.numel()
    )


def test_low_bits_can_be_dropped():
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    assert attach_rounded_off(param, torch.full((3,), 1 + 2.0**-12))
    assert attached_low_bits(param).tolist() == [2**11] * 3  # in units of 2**-23
    remove_low_bits(param)
    assert attached_low_bits(param) is None
    remove_low_bits(param)


def test_parameters_larger_than_a_chunk_and_with_gaps_in_memory():
    exact = torch.randn(300, 700).t()
    param = nn.Parameter(exact.to(BF16))
    assert not param.is_contiguous()
    attach_rounded_off(param, exact)
    assert torch.equal(fp32_value(param, attached_low_bits(param)), kept_values(exact))


@pytest.mark.parametrize("contiguous", [True, False])
def test_ties_are_kept_too(contiguous):
    """A cast rounds them to even, and weights stay there. 16 bits cannot hold 32768, so those miss one unit of FP32."""
    even, odd = torch.tensor([1.0, -1.0, 2.0**-120, 2.0**-133 * 2]), torch.tensor([1 + 2.0**-7, -1 - 2.0**-7, 0.0, 0.0])
    odd[2:] = even[2:] + torch.tensor([2.0**-127, 2.0**-133])
    exact = torch.stack([even, (even + odd) / 2, odd, odd + (odd - even) / 2])
    exact = exact if contiguous else exact.t().contiguous().t()
    param = nn.Parameter(exact.to(BF16))
    cast = param.detach().clone()
    assert attach_rounded_off(param, exact)
    assert torch.equal(cast, param)
    missing = exact.view(torch.int32) - fp32_value(param, attached_low_bits(param)).view(torch.int32)
    # The ties between an even number and an odd one above.
    assert missing.tolist() == [[0] * 4, [1] * 4, [0] * 4, [0] * 4]
