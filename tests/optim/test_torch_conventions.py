"""What every `torch.optim.Optimizer` does: closures, groups, hooks, copies, checkpoints, refusals."""

import math

import pytest
import torch

from hf_lowprec.optim import SGD, Adam, AdamW, Adan, Lion, Muon, RAdam, StableAdamW
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


def test_step_hooks_run_around_the_update():
    optimizer, seen = SGD(parameters(), lr=1.0), []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(opt.param_groups[0]["params"][1][0].item()))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt.param_groups[0]["params"][1][0].item()))
    train(optimizer, 1)
    assert len(seen) == 2
    assert seen[0] != seen[1]


CYCLES = [
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
]


@pytest.mark.parametrize("make", CYCLES, ids=["onecycle", "cyclic"])
@pytest.mark.parametrize("cls", [Adam, Adan, Lion, RAdam, StableAdamW])
def test_a_cycled_momentum_is_the_first_of_the_betas(cls, make):
    """The same as writing each step's rates into a group by hand."""
    cycled, by_hand = cls(parameters(FP32)), cls(parameters(FP32))
    scheduler = make(cycled)
    for step in range(5):
        by_hand.param_groups[0].update({key: cycled.param_groups[0][key] for key in ("lr", "betas")})
        assert by_hand.param_groups[0]["betas"][1:] == by_hand.defaults["betas"][1:]
        for optimizer in (cycled, by_hand):
            train(optimizer, 1, seed=step)
        scheduler.step()
    assert all(map(torch.equal, params_of(cycled), params_of(by_hand)))
    assert cycled.param_groups[0]["betas"] != cycled.defaults["betas"]


def test_adding_a_group_does_not_look_at_the_others(monkeypatch):
    """Thousands of groups, one for each parameter, would take time that grows with the square of their number."""
    looks = []
    monkeypatch.setattr("hf_lowprec.optim.arguments.mode_name", lambda name: looks.append(name) or name)
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


def trained(cls=AdamW, shapes=None, **options) -> torch.optim.Optimizer:
    params = parameters() if shapes is None else [torch.nn.Parameter(torch.ones(s, dtype=BF16)) for s in shapes]
    optimizer = cls(params, **options)
    train(optimizer, 2)
    return optimizer


MISFITS = [
    pytest.param(lambda: trained(shapes=[(5, 3), (65,), ()]), ["65", "64"], id="shape"),
    pytest.param(lambda: trained(shapes=[(3, 5), (64,), ()]), ["(3, 5)", "(5, 3)"], id="transposed"),
    pytest.param(lambda: trained(shapes=[(5, 3), (64,)]), [], id="fewer-parameters"),
    pytest.param(lambda: trained(torch.optim.Adagrad), ["AdamW", "can be converted"], id="torch.optim.Adagrad"),
    pytest.param(lambda: trained(SGD, momentum=0.9), ["state of SGD", "into AdamW", "resume with SGD"], id="SGD"),
]


@pytest.mark.parametrize(("make", "words"), MISFITS)
def test_a_state_dict_that_does_not_fit_is_refused(make, words):
    optimizer, state_dict = trained(), make().state_dict()
    refuses(lambda: optimizer.load_state_dict(state_dict), optimizer, words)


BAD_ADAMW = [("lr", value) for value in (-1.0, NAN, "fast", torch.tensor(-1.0), torch.ones(2))]
BAD_ADAMW += [("betas", value) for value in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), (0.9, NAN), (0.9,), 0.9)]
BAD_ADAMW += [("eps", -1.0), ("eps", NAN), ("weight_decay", -1.0), ("weight_decay", NAN), ("seed", 1.5), ("seed", None)]
BAD_ADAMW += [("rounding", "up"), ("rounding", None), ("state_rounding", "kahan"), ("state_dtype", "float8")]
BAD_ADAMW += [("state_dtype", value) for value in (FP16, torch.int32, {"exp_avg": FP16}, {"velocity": FP32})]
BAD_SGD = [("lr", NAN), ("momentum", -1.0), ("momentum", NAN), ("dampening", NAN), ("weight_decay", NAN)]
BAD_SGD += [("weight_decay", -1.0), ("nesterov", True)]
BAD_ADAM = [("betas", (0.9, 1.0)), ("eps", -1.0), ("weight_decay", NAN), ("decoupled_weight_decay", "maybe")]
BAD_LION = [("betas", (1.0, 0.9)), ("betas", (0.9, 0.99, 0.9)), ("betas", 0.9), ("weight_decay", -1.0)]
BAD_ADAN = [("betas", (0.98, 0.92)), ("betas", (0.98, 0.92, 1.0)), ("eps", NAN), ("weight_decay", -1.0), ("no_prox", 2)]
TABLES = {AdamW: BAD_ADAMW, SGD: BAD_SGD, Adam: BAD_ADAM, RAdam: BAD_ADAM, Lion: BAD_LION, Adan: BAD_ADAN}
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


@pytest.mark.parametrize(("name", "value"), [("lr", NAN), ("rounding", "up"), ("state_rounding", 3), ("eps", -1.0)])
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
