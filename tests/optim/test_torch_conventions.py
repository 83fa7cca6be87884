"""What every `torch.optim.Optimizer` does: closures, groups, hooks, copies, checkpoints, refusals."""

import math

import pytest
import torch

from hf_lowprec.optim import SGD, Adafactor, Adam, AdamW, Adan, Lion, Muon, Prodigy, RAdam, ScheduleFreeAdamW
from hf_lowprec.optim.arguments import READERS
from hf_lowprec.rounding import Rounding
from tests.support.optim.optimizer_contents import assert_equal, everything, params_of, refuses, train

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = math.nan


def parameters(dtype: torch.dtype = BF16) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(10)
    shapes = [(5, 3), (64,), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    (param, *_), calls = parameters(), []
    optimizer = AdamW([param], lr=0.1)

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.float().square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert calls == [True] * 5
    assert losses[-1] < losses[0]
    assert optimizer.step() is None


def test_adding_a_group_does_not_look_at_the_others(monkeypatch):
    """Thousands of groups, one for each parameter, would take time that grows with the square of their number."""
    looks = []
    monkeypatch.setitem(READERS, Rounding, lambda name: looks.append(name) or name)
    AdamW([{"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]} for _ in range(20)])
    assert len(looks) == 1 + 20


@pytest.mark.parametrize("cls", [AdamW, torch.optim.AdamW])
def test_a_look_at_the_state_of_an_idle_parameter_leaves_a_checkpoint_that_loads(cls):
    """`optimizer.state` is a `defaultdict`, so the look creates an empty entry."""
    looked_at, resumed = cls(parameters()), AdamW(parameters())
    stepped, idle, _ = params_of(looked_at)
    stepped.grad = torch.ones_like(stepped)
    looked_at.step()
    assert not looked_at.state[idle]
    resumed.load_state_dict(looked_at.state_dict())
    assert [param.shape for param in resumed.state] == [stepped.shape]


def trained(cls=AdamW, shapes=None) -> torch.optim.Optimizer:
    params = parameters() if shapes is None else [torch.nn.Parameter(torch.ones(s, dtype=BF16)) for s in shapes]
    optimizer = cls(params)
    train(optimizer, 2)
    return optimizer


MISFITS = [
    pytest.param(lambda: trained(shapes=[(5, 3), (65,), ()]), ["65", "64"], id="shape"),
    pytest.param(lambda: trained(shapes=[(3, 5), (64,), ()]), ["(3, 5)", "(5, 3)"], id="transposed"),
    pytest.param(lambda: trained(shapes=[(5, 3), (64,)]), [], id="fewer-parameters"),
]


@pytest.mark.parametrize(("make", "words"), MISFITS)
def test_a_state_dict_that_does_not_fit_is_refused(make, words):
    optimizer, state_dict = trained(), make().state_dict()
    refuses(lambda: optimizer.load_state_dict(state_dict), optimizer, words)


BAD_ADAMW = [("lr", value) for value in (-1.0, NAN, math.inf, "fast", torch.tensor(-1.0), torch.ones(2))]
BAD_ADAMW += [("betas", value) for value in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), (0.9, NAN), (0.9,), 0.9)]
BAD_ADAMW += [("eps", -1.0), ("eps", None), ("weight_decay", NAN), ("seed", 1.5), ("seed", None)]
BAD_ADAMW += [("maximize", 3), ("amsgrad", "maybe")]
BAD_ADAMW += [("rounding", "up"), ("rounding", None), ("state_rounding", "kahan"), ("state_dtype", "float8")]
BAD_ADAMW += [("state_dtype", value) for value in (FP16, torch.int32, {"exp_avg": FP16}, {"velocity": FP32})]
BAD_SGD = [("lr", NAN), ("momentum", -1.0), ("momentum", NAN), ("dampening", NAN), ("weight_decay", NAN)]
BAD_SGD += [("weight_decay", -1.0), ("nesterov", True)]
BAD_ADAM = [("betas", (0.9, 1.0)), ("eps", -1.0), ("weight_decay", NAN), ("decoupled_weight_decay", "maybe")]
BAD_LION = [("betas", (1.0, 0.9)), ("betas", (0.9, 0.99, 0.9)), ("betas", 0.9), ("weight_decay", -1.0)]
BAD_ADAN = [("betas", (0.98, 0.92)), ("betas", (0.98, 0.92, 1.0)), ("eps", NAN), ("weight_decay", -1.0), ("no_prox", 2)]
BAD_ADAFACTOR = [("lr", NAN), ("lr", None), ("d", 0.5), ("d", NAN), ("beta2_decay", 0.5), ("beta2_decay", "fast")]
BAD_ADAFACTOR += [("beta1", 1.0), ("beta1", NAN), ("eps", 1e-3), ("eps", (1e-30,)), ("eps", (-1e-30, 1e-3))]
BAD_ADAFACTOR += [("eps", (1e-30, NAN)), ("relative_step", "maybe"), ("scale_parameter", 2), ("weight_decay", -1.0)]
BAD_SCHEDULE_FREE = [("betas", (0.0, 0.9)), ("warmup_steps", -1), ("warmup_steps", 1.5), ("eps", -1.0)]
TABLES = {AdamW: BAD_ADAMW, SGD: BAD_SGD, Adam: BAD_ADAM, RAdam: BAD_ADAM, Lion: BAD_LION, Adan: BAD_ADAN}
TABLES |= {Adafactor: BAD_ADAFACTOR, ScheduleFreeAdamW: BAD_SCHEDULE_FREE, Prodigy: [("d0", -1.0), ("d_coef", -1.0)]}
BAD = [pytest.param(cls, *bad, id=f"{cls.__name__}-{bad}") for cls, table in TABLES.items() for bad in table]
RIGHT = {
    "rounding": ["kahan", "split", "stochastic", "nearest"],
    "state_rounding": ["stochastic", "nearest"],
}
RIGHT |= {"nesterov": ["momentum", "dampening"], "state_dtype": [], "seed": ["integer"]}


@pytest.mark.parametrize(("cls", "name", "value"), BAD)
def test_a_bad_hyperparameter_is_refused_wherever_it_is_given(cls, name, value):
    words = [name, *RIGHT.get(name, [])]
    words += [repr(value)] if isinstance(value, (float, str)) else []
    with pytest.raises(ValueError, match=name):
        cls(parameters(), **{name: value})
    optimizer = trained(cls)
    group = {"params": [torch.nn.Parameter(torch.ones(2, dtype=BF16))], name: value}
    refuses(lambda: optimizer.add_param_group(group), optimizer, words)


@pytest.mark.parametrize("group", [{}, {"lr": 1.0}, {"params": None}])
@pytest.mark.parametrize("options", [(AdamW, {}), (Muon, {"matrices": []})])
def test_a_group_without_params_is_refused(options, group):
    cls, matrices = options
    with pytest.raises(ValueError, match="param group 1 has no 'params'"):
        cls([{"params": parameters()}, group], **matrices)


@pytest.mark.parametrize(("name", "value"), [("lr", NAN), ("lr", 1e38), ("rounding", "up"), ("state_rounding", 3)])
def test_a_bad_value_written_into_a_group_stops_the_step_before_it_changes_anything(name, value):
    optimizer = trained()
    good = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    before = everything(optimizer)["params"], everything(optimizer)["state"]
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert_equal((everything(optimizer)["params"], everything(optimizer)["state"]), before)
    optimizer.param_groups[0][name] = good
    train(optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_of_another_dtype_are_refused_and_leave_no_trace(dtype):
    optimizer, param = trained(), torch.nn.Parameter(torch.ones(3, dtype=dtype))
    refuses(lambda: optimizer.add_param_group({"params": [param]}), optimizer, [str(dtype), "bfloat16", "float32"])
    already = params_of(optimizer)[0]
    refuses(lambda: optimizer.add_param_group({"params": [already]}), optimizer, [])
