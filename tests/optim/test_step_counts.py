"""Numbers of parameters and counts of steps, which random bits depend on.

Optimizers of one parameter each draw the bits of one of all. Counts are integers: nothing changes at 2²⁴, where FP32
stops counting; random bits repeat after 2³².
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, AdamW, param_groups
from hf_lowprec.rounding import round_stochastic
from hf_lowprec.rounding.random_bits import random_bits
from tests.support.training.tiny_trainer import arguments
from tests.support.triton_available import quiet_interpreter

OPTIONS = [{"rounding": "stochastic"}, {"rounding": "kahan"}, {"backend": "eager", "seed": 5, "lr": torch.tensor(1e-2)}]


@pytest.fixture(autouse=True)
def fresh_numbers():
    param_groups.reset_numbers()


def parameters(number: int = 3, size: int = 4096) -> list[nn.Parameter]:
    """Parameters with equal weights."""
    return [nn.Parameter(torch.full((size,), 0.75).bfloat16()) for _ in range(number)]


def train(params, optimizers, steps: int = 3) -> None:
    for step in range(steps):
        for param in params:
            param.grad = torch.full_like(param, 0.1 + step)
        for optimizer in optimizers:
            optimizer.step()


def tensors(params, optimizers) -> list[torch.Tensor]:
    state = {param: values for optimizer in optimizers for param, values in optimizer.state.items()}
    return [tensor for param in params for tensor in (param, *state[param].values())]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_optimizer_per_parameter_draws_the_bits_of_one_of_all(options):
    together, apart = parameters(), parameters()
    one = [AdamW(together, **options)]
    each = [AdamW([param], **options) for param in apart]
    train(together, one)
    train(apart, each[::-1])  # as in a backward pass: numbers are those of construction
    assert all(map(torch.equal, tensors(together, one), tensors(apart, each)))
    assert not torch.equal(apart[0], apart[1]) or not torch.equal(*(each[k].state[apart[k]]["exp_avg"] for k in (0, 1)))


def test_a_number_can_be_given():
    params, others = parameters(), parameters()
    train(params, [AdamW([param], first_parameter=7) for param in params])
    train(others, [AdamW([*others[:1]], first_parameter=7), AdamW(others[1:], first_parameter=7)])
    assert torch.equal(params[0], params[1])  # asked for
    assert torch.equal(params[0], others[0]) and torch.equal(params[0], others[1])
    shifted, whole = parameters(1), parameters(3)
    train(shifted, [AdamW(shifted, first_parameter=2)])
    train(whole, [AdamW(whole)])
    assert torch.equal(shifted[0], whole[2])


def test_runs_that_are_compared_start_at_the_same_number():
    """Two models, and single parameters with optimizers of different settings."""
    first, second = parameters(), parameters()
    train([*first, *second], [AdamW(first), AdamW(second)])
    assert all(map(torch.equal, first, second))
    params = parameters(2)
    train(params, [AdamW([params[0]], backend="eager"), AdamW([params[1]], backend="native")])
    assert torch.equal(*params)


def test_state_dicts_keep_them():
    params = parameters()
    optimizers = [AdamW([param], lr=1e-2) for param in params]
    train(params, optimizers)
    saved = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    others = [AdamW([param], lr=1e-2) for param in reversed(resumed)][::-1]
    for other, state in zip(others, saved, strict=True):
        other.load_state_dict(state)
    train(params, optimizers)
    train(resumed, others)
    assert all(map(torch.equal, tensors(params, optimizers), tensors(resumed, others)))


def test_an_added_group_continues_the_numbering():
    params, whole = parameters(4), parameters(4)
    optimizers = [AdamW([param], lr=1e-2, rounding="stochastic") for param in params[:2]]
    optimizers[1].add_param_group({"params": params[2:]})
    one = [AdamW(whole, lr=1e-2, rounding="stochastic")]
    train(params, optimizers)
    train(whole, one)
    assert all(map(torch.equal, tensors(params, optimizers), tensors(whole, one)))


def test_an_optimizer_that_only_checks_arguments_is_not_counted(tmp_path):
    from hf_lowprec.integrations.transformers.training_arguments import checked_arguments

    kwargs = checked_arguments(arguments(tmp_path, optim="adamw_bf16_kahan"))
    assert "first_parameter" not in AdamW(parameters(1), **kwargs).param_groups[0]
    numbered = arguments(tmp_path, optim="adamw_bf16_kahan", optim_args="first_parameter=3")
    assert checked_arguments(numbered)["first_parameter"] == 3


def test_a_number_of_any_integer_type_is_accepted_and_saved():
    params, twins = parameters(1), parameters(1)
    optimizer, twin = AdamW(params, first_parameter=np.int64(2)), AdamW(twins, first_parameter=2)
    train(params, [optimizer])
    train(twins, [twin])
    assert torch.equal(*params, *twins)
    assert optimizer.state_dict()["param_groups"] == twin.state_dict()["param_groups"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["first_parameter"] == 2


pytestmark = quiet_interpreter
ELEMENTS = 4096
LAST = 2**24
"""The first whole number whose successor FP32 does not have."""


def stepped_before(
    steps: int, cls=SGD, count_dtype=torch.int64, **options
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A weight of ones and its optimizer, which has taken a number of steps."""
    param = nn.Parameter(torch.ones(ELEMENTS).bfloat16())
    optimizer = cls([param], **{"lr": 1.0, "rounding": "stochastic", **options})
    param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.state[param]["step"] = torch.tensor(steps, dtype=count_dtype, device="cpu")
    return param, optimizer


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("before", [LAST - 1, LAST + 5, 2**31 - 1, 2**32 - 1, 2**33 + 3])
def test_every_step_draws_bits_of_its_own(any_backend, before, options):
    param, optimizer = stepped_before(before, backend=any_backend, **options)
    index = torch.arange(ELEMENTS, device=param.device)
    expected = torch.ones(ELEMENTS)
    for step in range(before + 1, before + 3):
        param.grad = torch.full_like(param, 2.0**-12)  # a 16th of an ulp below one
        optimizer.step()
        bits = random_bits(seed=0, step=step, parameter=0, role=0, index=index)
        expected = round_stochastic(expected.to(param.device) - 2.0**-12, bits)
        assert torch.equal(param.float(), expected)
        assert optimizer.state[param]["step"] == step
        assert optimizer.state[param]["step"].dtype == torch.int64


def test_a_count_in_fp32_that_was_pickled_or_put_there_becomes_an_integer(any_backend):
    param, optimizer = stepped_before(LAST, count_dtype=torch.float32, backend=any_backend, skip_nonfinite=True)
    other = copy.deepcopy(optimizer)
    for each in (optimizer, other):
        (stepped,) = each.param_groups[0]["params"]
        for _ in range(2):
            stepped.grad = torch.full_like(stepped, 2.0**-12)
            each.step()
        assert each.state[stepped]["step"] == LAST + 2
    assert torch.equal(param, other.param_groups[0]["params"][0])


def test_distributed_checkpoints_keep_counts_whole(tmp_path):
    """Torch's distributed state dicts, and one of FP32 counts loaded into integers."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def built():
        torch.manual_seed(0)
        model = nn.Linear(4, 4).bfloat16()
        return model, AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()

    model, optimizer = built()
    train(model, optimizer)
    optimizer.state[model.weight]["step"].fill_(LAST + 1)
    saved = get_optimizer_state_dict(model, optimizer)
    assert saved["state"]["weight"]["step"].dtype == torch.int64
    for count in (LAST + 1, 5):
        if count == 5:
            saved["state"]["weight"]["step"] = torch.tensor(5.0)
        dcp.save(saved, checkpoint_id=tmp_path / str(count))
        other, resumed = built()
        target = get_optimizer_state_dict(other, resumed)
        dcp.load(target, checkpoint_id=tmp_path / str(count))
        set_optimizer_state_dict(other, resumed, target)
        assert resumed.state[other.weight]["step"] == count
        train(other, resumed)
        assert resumed.state[other.weight]["step"] == count + 1


@pytest.mark.parametrize("steps", [LAST + 7, 2**40])
def test_bias_corrections_of_huge_steps_are_those_of_the_limit(any_backend, steps):
    param, optimizer = stepped_before(steps, AdamW, lr=2.0**-6, backend=any_backend, betas=(0.0, 0.0), weight_decay=0.0)
    param.grad = torch.full_like(param, 3.0)
    optimizer.step()
    assert torch.equal(param, torch.full_like(param, 1 - 2.0**-6))
