"""What torch's own test suite asks of every optimizer, asked of every algorithm, rounding mode and option."""

import copy
import io
import pickle
import warnings
from itertools import chain

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_lowprec.optim.algorithms import ALGORITHMS
from tests.support.optim.every_optimizer import (
    BF16,
    FP16,
    FP32,
    OPTIONS,
    Problem,
    all_params,
    build,
    every_algorithm,
    every_mode,
    give_gradients,
    parameters,
    same,
    train,
)
from tests.support.optim.gradient_dtypes import allow_gradients_in
from tests.support.optim.optimizer_contents import assert_equal, everything, refuses

# Steps.


def test_a_closure_runs_with_gradients_and_its_loss_is_returned():
    problem, calls = Problem(BF16), []
    optimizer = build("AdamW", problem.params, lr=0.1)
    closure = problem.closure(optimizer)
    losses = [optimizer.step(lambda: (calls.append(torch.is_grad_enabled()), closure())[1]) for _ in range(5)]
    assert calls == [True] * 5
    assert losses[-1] < losses[0]
    assert optimizer.step() is None


@pytest.mark.combinations(1)
@every_mode
def test_no_gradient_is_no_step_and_zero_gradients_move_nothing(name, dtype, options):
    """Also of parameters that are empty, among others and alone."""
    shapes = [(5, 3), (0, 3), (7,), (0,)]
    for kept in (shapes, shapes[1::2]):
        params = parameters(dtype, kept)
        optimizer = build(name, params, lr=0.1, **{**options, "weight_decay": 0.0})
        assert optimizer.step(lambda: 1.0) == 1.0
        assert not any(optimizer.state.values())
        for _ in range(2):
            for param in params:
                param.grad = torch.zeros_like(param)
            optimizer.step()
        assert same(params, parameters(dtype, kept))
        train(optimizer, params, range(2))
        before = everything(optimizer)
        optimizer.zero_grad()
        optimizer.step()
        assert_equal(everything(optimizer), before)


@every_algorithm
def test_a_step_with_an_infinite_gradient_is_skipped(name):
    found = []
    for steps in ([0, 1, 2, 3], [0, 1, 3]):
        params = parameters()
        optimizer = build(name, params, skip_nonfinite=True, **OPTIONS[name][0])
        for step in steps:
            give_gradients(params, step)
            params[0].grad[2, 2] = torch.inf if step == 2 else 1.0
            optimizer.step()
        found.append([everything(optimizer)[key] for key in ("params", "state")])
    assert_equal(*found)


@every_algorithm
def test_groups_are_optimizers_of_their_own(name):
    """With dtypes and hyperparameters of their own. Random bits know a parameter's position, so all is to nearest."""
    shared = {"rounding": "nearest", "state_rounding": "nearest", **OPTIONS[name][0]}
    settings = [
        (BF16, {"lr": 0.1}),
        (FP32, {"lr": 0.01, "weight_decay": 0.5}),
        (FP16, {"lr": 0.01, "rounding": "kahan"}),
        (BF16, {"lr": 0.0, "weight_decay": 0.0}),
    ]
    grouped, apart = ([parameters(dtype, [(5, 3), (4, 2)]) for dtype, _ in settings] for _ in range(2))
    groups = [{"params": params, **own} for params, (_, own) in zip(grouped, settings, strict=True)]
    train(ALGORITHMS[name](groups, **shared), list(chain(*grouped)), range(4))
    alone = [ALGORITHMS[name](params, **{**shared, **own}) for params, (_, own) in zip(apart, settings, strict=True)]
    for step in range(4):
        give_gradients(chain(*apart), step)
        for optimizer in alone:
            optimizer.step()
    assert same(chain(*grouped), chain(*apart))
    assert same(grouped[3], parameters(BF16, [(5, 3), (4, 2)]))  # a learning rate of zero
    assert not same(grouped[0], parameters(BF16, [(5, 3), (4, 2)]))


@every_algorithm
def test_a_step_leaves_gradients_and_autograd_as_they_were(name):
    problem = Problem(BF16)
    optimizer = build(name, problem.params, **OPTIONS[name][0])
    problem.closure(optimizer)()
    grads = [param.grad.clone() for param in problem.params]
    with torch.enable_grad():
        optimizer.step()
        assert torch.is_grad_enabled()
    assert same([param.grad for param in problem.params], grads)
    assert all(param.requires_grad and param.is_leaf and param.grad_fn is None for param in problem.params)
    assert not any(value.requires_grad for state in optimizer.state.values() for value in state.values())


@every_algorithm
@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_complex_and_sparse_gradients_are_refused(name, kind):
    params = parameters(BF16, [(5, 3), (4, 2)])
    optimizer = build(name, params, **OPTIONS[name][0])
    train(optimizer, params, range(2))
    if kind == "complex":
        allow_gradients_in(None, params)
    params[1].grad = params[1].grad.to_sparse() if kind == "sparse" else params[1].grad.to(torch.complex64)
    refuses(optimizer.step, optimizer, [kind])


@pytest.mark.combinations(1)
@every_mode
def test_a_loss_scale_changes_nothing_and_an_overflow_skips_the_step(name, dtype, options):
    if dtype == FP16:
        return  # torch's GradScaler refuses FP16 gradients, whoever the optimizer is
    scaled, plain = Problem(dtype), Problem(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    optimizers = [build(name, problem.params, lr=0.01, **options) for problem in (scaled, plain)]
    for step in range(4):
        optimizers[0].zero_grad()
        scaler.scale(scaled.loss()).backward()
        if step == 2:
            scaled.bias.grad[0] = torch.inf
            before = [param.detach().clone() for param in scaled.params]
        scaler.step(optimizers[0])
        scaler.update()
        if step == 2:
            assert same(scaled.params, before)
            assert scaler.get_scale() == 2.0**7
        else:
            plain.closure(optimizers[1])()
            optimizers[1].step()
    assert same(scaled.params, plain.params)  # powers of two are exact
    assert int(optimizers[0].state[scaled.weight]["step"]) == 3


# Groups.


@every_algorithm
def test_every_group_has_every_argument(name):
    params = parameters(BF16, [(5, 3), (4, 2), (2, 2)])
    optimizer = ALGORITHMS[name]([{"params": params[:1]}, {"params": params[1:2], "lr": 0.5}], lr=0.25, seed=3)
    optimizer.add_param_group({"params": params[2], "seed": 4})
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5, 0.25]
    assert [group["seed"] for group in optimizer.param_groups] == [3, 3, 4]
    for group in optimizer.param_groups:
        assert optimizer.defaults.keys() <= group.keys()
    train(optimizer, params, range(2))


REFUSED_BY_TORCH = [
    (lambda first, second: first, TypeError, "iterable of Tensors or dicts"),
    (lambda first, second: [], ValueError, "empty parameter list"),
    (lambda first, second: [{"params": [first]}, {"params": [first]}], ValueError, "more than one parameter group"),
    (lambda first, second: [("first", first), second], ValueError, "with/without names"),
    (lambda first, second: [{"params": [first]}, {"params": [("second", second)]}], ValueError, "with/without names"),
    (lambda first, second: [{"params": {first, second}}], TypeError, "ordered collections"),
    (lambda first, second: [first * 2], ValueError, "non-leaf"),
    (lambda first, second: [{"params": [1.0]}], TypeError, "can only optimize Tensors"),
]


@pytest.mark.combinations(1)
@every_algorithm
@pytest.mark.parametrize(("make", "error", "message"), REFUSED_BY_TORCH)
def test_what_torch_refuses_of_groups_is_refused(name, make, error, message):
    with pytest.raises(error, match=message):
        ALGORITHMS[name](make(*parameters(BF16, [(5, 3), (4, 2)])))


@every_algorithm
def test_subclasses_of_parameter_are_parameters(name):
    class Tagged(nn.Parameter):
        tag = "layer 3"

    (plain,), tagged = parameters(BF16, [(5, 3)]), Tagged(parameters(BF16, [(5, 3)])[0].data)
    for param in (plain, tagged):
        train(build(name, [param], lr=0.01, **OPTIONS[name][0]), [param], range(3))
    assert type(tagged) is Tagged
    assert tagged.tag == "layer 3"
    assert torch.equal(plain.data, tagged.data.as_subclass(torch.Tensor))


# State dicts.


@pytest.mark.parametrize("loaded_named", [False, True], ids=["to plain", "to named"])
@pytest.mark.parametrize("saved_named", [False, True], ids=["plain", "named"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.combinations(1)
@every_mode
def test_a_loaded_optimizer_goes_on_as_the_saved_one(name, dtype, options, steps, saved_named, loaded_named):
    """Also a trained one that gets the state dict of a fresh one."""

    def named(params, yes):
        return [(f"layer.{k}", param) for k, param in enumerate(params)] if yes else params

    params = parameters(dtype)
    optimizer = build(name, named(params, saved_named), lr=0.01, **options)
    train(optimizer, params, range(steps))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert_equal(saved, optimizer.state_dict())

    twins = parameters(dtype)
    twin = build(name, named(twins, loaded_named), lr=0.01, **options)
    train(twin, twins, [7])
    for param, its in zip(params, twins, strict=True):
        its.data.copy_(param.data)
    untouched = copy.deepcopy(saved)
    twin.load_state_dict(saved)
    assert_equal(saved, untouched)
    for step in range(3, 6):
        for one, its in ((optimizer, params), (twin, twins)):
            train(one, its, [step])
        assert same(params, twins)
    found, expected = (copy.deepcopy(one.state_dict()) for one in (twin, optimizer))
    names = [name for group in found["param_groups"] for name in group.pop("param_names", [])]
    for group in expected["param_groups"]:
        group.pop("param_names", None)
    assert_equal(found, expected)
    everyone = [name for name, _ in named(params, True)]
    assert sorted(names) == (everyone if saved_named or loaded_named else [])

    twin.param_groups.extend(twin.param_groups)  # a parameter that is there twice is saved as one
    groups = twin.state_dict()["param_groups"]
    assert_equal(groups[: len(groups) // 2], groups[len(groups) // 2 :])


@every_algorithm
def test_names_do_not_decide_where_a_state_goes(name):
    """As in torch: positions do, and the saved names come along."""
    params, twins = (parameters(BF16, [(5, 3), (5, 3)]) for _ in range(2))
    source = build(name, [("a", params[0]), ("b", params[1])], **OPTIONS[name][0])
    train(source, params, range(2))
    target = build(name, [("b", twins[0]), ("a", twins[1])], **OPTIONS[name][0])
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["param_names"] == ["a", "b"]
    for param, twin in zip(params, twins, strict=True):
        assert_equal(source.state[param], target.state[twin])


@every_algorithm
def test_the_state_of_fp32_parameters_serves_16_bit_ones_but_for_a_compensation(name):
    params = parameters(FP32, [(5, 3), (4, 2)])
    source = build(name, params, rounding="stochastic", **OPTIONS[name][0])
    train(source, params, range(2))
    halves = [nn.Parameter(param.detach().bfloat16()) for param in params]
    target = build(name, halves, rounding="stochastic", **OPTIONS[name][0])
    target.load_state_dict(source.state_dict())
    for param, half in zip(params, halves, strict=True):
        assert_equal(source.state[param], target.state[half])
    train(target, halves, range(2))
    options = {"rounding": "kahan", **OPTIONS[name][0]}
    fp32, bf16 = (build(name, parameters(dtype, [(5, 3), (4, 2)]), **options) for dtype in (FP32, BF16))
    for one, other, dtype in ((fp32, bf16, "bfloat16"), (bf16, fp32, "float32")):
        train(one, all_params(one), range(2))
        words = ["parameter 0", "'compensation'", dtype, "the same keep_fp32"]
        refuses(lambda one=one, other=other: other.load_state_dict(one.state_dict()), other, words)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
@every_algorithm
def test_copies_have_every_public_attribute(name, copied):
    params = parameters()
    optimizer = build(name, params, max_grad_norm=1.0, skip_nonfinite=True, **OPTIONS[name][0])
    train(optimizer, params, range(2))
    twin, before = copied(optimizer), everything(optimizer)

    def public(one):
        return {key: value for key, value in vars(one).items() if not key.startswith("_") and key != "state"}

    assert public(twin).keys() == public(optimizer).keys()
    for key in ("backend", "max_grad_norm", "skip_nonfinite", "grad_norm"):
        assert_equal(getattr(twin, key), getattr(optimizer, key))
    train(twin, all_params(twin), range(2, 4))
    assert_equal(everything(optimizer), before)
    train(optimizer, params, range(2, 4))
    assert_equal(everything(twin), everything(optimizer))


# Hooks.


@every_algorithm
def test_hooks_of_steps_run_in_torchs_order_until_they_are_removed(name):
    seen = []

    def hook(word):
        return lambda optimizer, args, kwargs: seen.append(word)

    params = parameters()
    ours, torchs = build(name, params), torch.optim.SGD(parameters())
    handles = [
        register_optimizer_step_pre_hook(hook("before all")),
        register_optimizer_step_post_hook(hook("after all")),
        *(one.register_step_pre_hook(hook("before")) for one in (ours, torchs)),
        *(one.register_step_post_hook(hook("after")) for one in (ours, torchs)),
    ]
    order = ["before all", "before", "after", "after all"]
    for one in (ours, torchs, ours):
        one.step()
    assert seen == order * 3
    for handle in handles:
        handle.remove()
    ours.step()
    assert seen == order * 3


@every_algorithm
def test_a_hook_may_replace_the_closure(name):
    optimizer = build(name, parameters())
    optimizer.register_step_pre_hook(lambda one, args, kwargs: ((one, lambda: 2.0), {}))
    assert optimizer.step(lambda: 1.0) == 2.0


@every_algorithm
def test_hooks_of_state_dicts_may_leave_and_change_entries(name):
    """Also in `state`, under keys that are no parameters; a step goes on past them."""
    params = parameters()
    optimizer = build(name, params, **OPTIONS[name][0])
    handle = optimizer.register_state_dict_pre_hook(lambda one: one.state.update(note=1))
    optimizer.register_state_dict_post_hook(lambda one, saved: {**saved, "extra": saved["state"]["note"]})
    saved = optimizer.state_dict()
    assert saved["extra"] == saved["state"]["note"] == 1
    train(optimizer, params, range(2))
    handle.remove()
    saved = optimizer.state_dict()
    twin = build(name, parameters(), **OPTIONS[name][0])
    twin.load_state_dict(saved)
    assert twin.state["note"] == 1
    train(twin, all_params(twin), range(2))


@every_algorithm
def test_hooks_of_loading_run_in_their_order_and_their_state_dict_is_loaded(name):
    def in_place(optimizer, saved):
        saved["param_groups"][0]["lr"] = 0.002

    def another(optimizer, saved):
        saved = copy.deepcopy(saved)
        saved["param_groups"][0]["lr"] = 0.003
        return saved

    optimizer = build(name, parameters())
    seen = []
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(one.param_groups[0]["lr"]))
    optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(another, prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(another)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [0.002, 0.002, 0.003]


@every_algorithm
def test_no_step_warns(name):
    params = parameters()
    optimizer = build(name, params, **OPTIONS[name][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, params, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        repr(optimizer)
