"""State dicts: the algorithm and format in them, and the options that they replace."""

import copy
import functools
import json
import math
import operator
import warnings
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

from hf_lowprec.optim import SGD, AdamW, Lion
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.arguments import keywords
from hf_lowprec.optim.state.saved_formats import FORMAT
from hf_lowprec.optim.validation import group_keys
from tests.support.optim.optimizer_contents import assert_equal, everything, params_of, refuses, train

OPTIONS = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}
PAIRS = list(permutations(sorted(ALGORITHMS), 2))


def optimizer(name: str, **options) -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).bfloat16()) for _ in range(2)]
    return ALGORITHMS[name](params, **{**OPTIONS.get(name, {}), **options})


def stepped(name: str, **options) -> torch.optim.Optimizer:
    made = optimizer(name, **options)
    train(made, 2)
    return made


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_our_state_without_a_header_is_not_taken_for_that_of_another_library(name):
    """Whose groups may have the same keys but for our own: an AdamW's are those of torchao."""
    target, saved = stepped(name), stepped(name).state_dict()
    refuses(
        lambda: target.load_state_dict(edited(saved, state_rounding="stochastic")),
        target,
        [f"neither by this version's hf_lowprec.{name} nor by an optimizer whose state can be converted"],
    )


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_the_state_of_another_algorithm_raises(saver, loader, steps):
    source, target = optimizer(saver), optimizer(loader)
    train(source, steps)
    words = [f"the state of {saver} cannot be loaded into {loader}", f"resume with {saver}"]
    refuses(lambda: target.load_state_dict(source.state_dict()), target, words)


def test_a_subclass_has_the_state_of_its_algorithm():
    class Named(AdamW):
        pass

    theirs, ours = (cls([nn.Parameter(torch.ones(3, 4).bfloat16())]) for cls in (Named, AdamW))
    train(theirs, 2)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert_equal(ours.state_dict(), theirs.state_dict())


def edited(state_dict: dict, **changes) -> dict:
    """A copy whose first group has `changes`; None removes a key."""
    saved = copy.deepcopy(state_dict)
    saved["param_groups"][0].update(changes)
    for key in (key for key, value in changes.items() if value is None):
        del saved["param_groups"][0][key]
    return saved


def header(**changes) -> str:
    return json.dumps({"state_rounding": "stochastic", "optimizer": "AdamW", "format": FORMAT, **changes})


@pytest.mark.filterwarnings("ignore:the state dict that was loaded replaces options:RuntimeWarning")  # AdamW's amsgrad
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_keys_that_a_state_dict_lacks_have_defaults(name):
    source = stepped(name)
    for key in group_keys(source) - {"lr", "rounding", "state_rounding", *source.flags}:
        target = optimizer(name)
        if key == "momentum" and name == "SGD":
            continue  # its default has no momentum_buffer
        target.load_state_dict(edited(source.state_dict(), **{key: None}))
        default = keywords(ALGORITHMS[name])[key]
        assert target.param_groups[0][key] == default, key
        train(target, 1)


def test_a_group_that_was_added_after_unpickling_is_loaded():
    """Torch adds "differentiable" to the defaults of an optimizer that it unpickles, so later groups have it."""
    source, target = stepped("AdamW"), optimizer("AdamW")
    source = copy.deepcopy(source)
    for made in (source, target):
        made.add_param_group({"params": [nn.Parameter(torch.ones(3, 4).bfloat16())]})
    assert ["differentiable" in group for group in source.param_groups] == [False, True]
    train(source, 1)
    target.load_state_dict(source.state_dict())
    assert_equal(target.state_dict()["state"], source.state_dict()["state"])


@pytest.mark.parametrize(
    ("given", "saved"), [(torch.float32, "float32"), ({"exp_avg_sq": torch.float32}, {"exp_avg_sq": "float32"})]
)
def test_dtypes_are_saved_by_name(given, saved):
    """Distributed checkpoints cannot gather `torch.dtype`."""
    source, target = stepped("AdamW", state_dtype=given), optimizer("AdamW")
    assert source.state_dict()["param_groups"][0]["state_dtype"] == saved
    with pytest.warns(RuntimeWarning, match="replaces options"):
        target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["state_dtype"] == given


GONE, GROUP, STATE, CARRIER = object(), ("param_groups", 0), ("state", 1), ("param_groups", 0, "state_rounding")
UNREADABLE = "state_rounding of a param group is damaged, or another version of hf_lowprec saved it: "


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((*GROUP, "lr"), GONE, "no 'lr'"),
        ((*GROUP, "rounding"), GONE, "no 'rounding'"),
        ((*GROUP, "params"), GONE, "has no 'params'"),
        ((*GROUP, "learns_from_tomorrow"), True, "has 'learns_from_tomorrow', unknown to AdamW"),
        (CARRIER, header(format=1), "format 1, but this hf_lowprec reads format 2"),
        (CARRIER, header(format=3), "format 3, but this hf_lowprec reads format 2"),
        (CARRIER, header(format=None), f"{UNREADABLE}format is None"),
        (CARRIER, header(eight_bits={"exp_avg": "11"}), f"{UNREADABLE}eight_bits is"),
        (CARRIER, header(first_parameter="3"), f"{UNREADABLE}first_parameter is"),
        *((CARRIER, text, UNREADABLE) for text in (header()[:-1], "{x", '{"a":' * 10**5, '{"format":' + "9" * 5000)),
        ((*GROUP, "betas"), "fast", "betas='fast' in param group 0 of the state dict"),
        ((*GROUP, "maximize"), 3, "maximize=3"),
        ((*GROUP, "eps"), -1.0, "eps=-1.0"),
        ((*GROUP, "seed"), "first", "seed='first'"),
        ((*GROUP, "state_dtype"), "float64", "state_dtype='float64'"),
        ((*GROUP, "rounding"), "up", "rounding='up'"),
        (("param_groups",), {0: {}}, "'param_groups' of the state dict must be a list"),
        (GROUP, [("lr", 0.1)], "param group 0 of the state dict must be a dict"),
        ((*GROUP, "params"), 3, "'params' in param group 0 of the state dict must be a list"),
        ((*GROUP, "params"), [[0]], "'params' in param group 0 of the state dict must be numbers"),
        ((*GROUP, "params"), [0, 0], "of the state dict contain a number twice"),
        (("state",), [(0, {})], "'state' of the state dict must be a dict, but is of type list"),
        (("state", 99), {}, "a state for parameter 99, which is in none"),
        (("state", "0"), {}, "a state for parameter '0', a string"),
        (STATE, [("step", 2)], "the state of parameter 1 of the state dict must be a dict"),
        ((*STATE, 5), 0, "the keys in the state of parameter 1 of the state dict must be strings"),
        ((*STATE, "exp_avg"), "lost", "exp_avg of parameter 1 is not a tensor but 'lost'"),
        ((*STATE, "exp_avg"), torch.ones(3, 4).to_sparse(), "the state dict is torch.sparse_coo on cpu"),
        ((*STATE, "step"), torch.tensor([3, 4]), "step of parameter 1 is [3, 4]; it must be a whole"),
        *(
            ((*STATE, "step"), step, "step of parameter 1 is ")
            for step in (1e30, 10**30, torch.tensor(1e19), 3.5, -1, math.nan, math.inf, 2**63, "3", None, [3, 4])
        ),
        ((*STATE, "step"), torch.tensor(2.5), "step of parameter 1 is 2.5; it must be a whole number"),
        ((*STATE, "step"), np.array(2), "step of parameter 1 is array(2)"),
        (("low_bits",), {0: {"low_bits": 1}}, "the low_bits of parameter 0 of the state dict"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(path, value, words):
    target, saved = stepped("AdamW"), copy.deepcopy(stepped("AdamW").state_dict())
    inner = functools.reduce(operator.getitem, path[:-1], saved)
    inner[path[-1]] = value
    if value is GONE:
        del inner[path[-1]]
    refuses(lambda: target.load_state_dict(saved), target, [words])


@pytest.mark.combinations(1)
@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_states_that_are_missing_or_unknown_are_refused_by_their_names(name, rounding):
    target, saved = stepped(name, rounding=rounding), copy.deepcopy(stepped(name, rounding=rounding).state_dict())
    states = dict(saved["state"][1])

    def refused(state: dict, *words: str) -> None:
        saved["state"][1] = state
        refuses(
            lambda: target.load_state_dict(saved), target, [f"parameter 1 of the state dict has {words[0]}", *words]
        )

    for missing in states:
        rest = {key: value for key, value in states.items() if key != missing}
        refused(rest, f"no '{missing}';", "Load a complete state dict", "leave out optimizer.load_state_dict")
    more = {**states, "exp_avg_cubed": torch.ones(3, 4), "foo": 1}
    refused(more, f"'exp_avg_cubed', 'foo', unknown to {name}", "Resume with", "take it out")


@pytest.mark.parametrize(
    ("name", "option", "on", "off"),
    [
        ("Adam", "amsgrad", True, False),
        ("AdamW", "amsgrad", True, False),
        ("SGD", "momentum", 0.9, 0.0),
        ("AdamW", "rounding", "kahan", "nearest"),
    ],
)
def test_the_state_of_an_option_that_was_switched_off_is_loaded(name, option, on, off):
    source = stepped(name, **{option: on})
    source.param_groups[0][option] = off
    train(source, 1)
    for before in (on, off):
        target = optimizer(name, **{option: before})
        target.param_groups[0][option] = off
        target.load_state_dict(source.state_dict())
        assert_equal(target.state_dict(), source.state_dict())


def test_what_the_user_keeps_besides_the_states_of_parameters_comes_back():
    """As torch's own optimizers do."""
    source, target = optimizer("AdamW"), stepped("AdamW")
    source.state["epoch"] = 3
    train(source, 2)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert target.state["epoch"] == 3
    with torch.no_grad():
        for ours, theirs in zip(params_of(target), params_of(source), strict=True):
            ours.copy_(theirs)
    for made in (source, target):
        train(made, 2)
    assert_equal(everything(target), everything(source))


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3), torch.tensor(3.0), torch.tensor([3]), np.int64(3)])
def test_a_step_count_of_any_type_is_accepted(step):
    target, saved = stepped("AdamW"), copy.deepcopy(stepped("AdamW").state_dict())
    saved["state"][1]["step"] = step
    target.load_state_dict(saved)
    count = target.state[params_of(target)[1]]["step"]
    assert (count, count.dtype) == (3, torch.int64)


def test_a_saved_group_in_param_groups_raises():
    target = stepped("AdamW")
    target.param_groups[0].update({**target.state_dict()["param_groups"][0], "params": params_of(target)})
    with pytest.raises(ValueError, match=r"from a group of state_dict\(\).*use load_state_dict$"):
        target.step()


@pytest.mark.parametrize("given", [{}, {"model": {}, "optimizer": {}}])
def test_an_argument_that_is_not_a_state_dict_raises(given):
    target = stepped("AdamW")
    refuses(lambda: target.load_state_dict(given), target, ["is not that of an optimizer", *given])


def test_keys_of_the_users_groups_come_back():
    made = [AdamW([{"params": [nn.Parameter(torch.ones(2).bfloat16())], "layer": k, "eps": 1e-6}]) for k in (3, 4)]
    made[1].load_state_dict(made[0].state_dict())
    assert made[1].param_groups[0]["layer"] == 3


SCHEDULERS = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=4),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


@pytest.mark.parametrize("scheduled_again", [True, False])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_keys_that_schedulers_write_are_not_changed_options(name, make, scheduled_again):
    source, target = optimizer(name, lr=0.01), optimizer(name, lr=0.02)
    schedule = make(source)
    for _ in range(3):
        train(source, 1)
        schedule.step()
    if scheduled_again:
        make(target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["lr"] == source.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("cls", "saved", "given", "message"),
    [
        (AdamW, {"amsgrad": True}, {}, r"amsgrad=True \(was False\)"),
        (AdamW, {}, {"amsgrad": True}, r"amsgrad=False \(was True\)"),
        (AdamW, {"betas": (0.8, 0.9)}, {"eps": 1e-6}, r"betas=\(0.8, 0.9\) \(was \(0.9, 0.999\)\), eps=1e-08 \(was 1e"),
        (AdamW, {"seed": 3}, {"seed": 4}, r"options of this AdamW: seed=3 \(was 4\); to train with"),
        (AdamW, {"state_rounding": "nearest"}, {}, r"state_rounding='nearest' \(was 'stochastic'\)"),
        (AdamW, {"state_dtype": torch.float32}, {}, r"state_dtype=torch.float32 \(was None\)"),
        (AdamW, {"weight_decay": 0.0}, {}, r"weight_decay=0.0 \(was 0.01\)"),
        (SGD, {"momentum": 0.9}, {}, r"momentum=0.9 \(was 0.0\)"),
        (Lion, {"maximize": True}, {}, r"maximize=True \(was False\)"),
    ],
)
def test_replaced_options_are_warned_about_once(cls, saved, given, message):
    """As in torch the state dict wins; the same change in several groups is named once."""

    def make(options):
        params = [nn.Parameter(torch.ones(3, 4).bfloat16()) for _ in range(2)]
        return cls([{"params": [param]} for param in params], **options)

    source, target = make(saved), make(given)
    train(source, 2)
    with pytest.warns(RuntimeWarning, match=message) as caught:
        target.load_state_dict(source.state_dict())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert str(caught[0].message).count("(was") == message.count("(was")
    assert ("Saved states keep their dtypes" in str(caught[0].message)) == ("state_dtype" in saved)
    assert_equal(target.state_dict(), source.state_dict())
    train(target, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(source.state_dict())


def test_added_keys_of_groups_are_saved_in_the_header():
    """No key of their own that a distributed checkpoint may lack."""
    source, target = (stepped("AdamW") for _ in range(2))
    source.param_groups[0]["first_parameter"] = 3
    saved = source.state_dict()
    assert "first_parameter" not in saved["param_groups"][0]
    assert saved["param_groups"][0]["state_rounding"] == header(first_parameter=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(saved)
        assert target.param_groups[0]["first_parameter"] == 3
        target.load_state_dict(edited(saved, state_rounding=header()))
    assert "first_parameter" not in target.param_groups[0]


def test_a_group_of_matrices_cannot_be_loaded_into_a_group_of_others():
    """Both have the same shape, so that only the flag distinguishes them."""
    groups = [
        [{"params": [nn.Parameter(torch.ones(3, 4).bfloat16())], "use_muon": flag} for flag in flags]
        for flags in ((True, False), (False, True))
    ]
    source, target = (ALGORITHMS["Muon"](group) for group in groups)
    refuses(lambda: target.load_state_dict(source.state_dict()), target, ["use_muon=True", "same order"])


# Distributed checkpoints: torch takes state dicts apart and loads them key by key.


def distributed_pair(name: str, full: bool, flat: bool, folder: Path, loader: str | None = None):
    """An optimizer whose state went through a distributed checkpoint of another one's, and the other."""
    how = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flat, cpu_offload=True)
    models = [nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))).bfloat16() for _ in range(2)]
    source, target = (
        ALGORITHMS[which](model.parameters(), **OPTIONS.get(which, {}))
        for which, model in zip((name, loader or name), models, strict=True)
    )
    train(source, 3)
    models[1].load_state_dict(models[0].state_dict())
    dcp.save({"o": get_optimizer_state_dict(models[0], source, options=how)}, checkpoint_id=folder, no_dist=True)
    loaded = {"o": get_optimizer_state_dict(models[1], target, options=how)}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(models[1], target, loaded["o"], options=how)
    return source, target


FORMS = [
    pytest.param(False, False, id="sharded"),
    pytest.param(False, True, id="flat"),
    pytest.param(True, False, id="full"),
]
quiet = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


@quiet
@pytest.mark.combinations(1)
@pytest.mark.parametrize(("full", "flat"), FORMS)
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_distributed_checkpoints_resume_bit_for_bit(name, full, flat, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        source, target = distributed_pair(name, full, flat, tmp_path)
    for made in (source, target):
        train(made, 3, seed=1)
    first, second = (everything(made) for made in (source, target))
    assert_equal([first["params"], first["state"]], [second["params"], second["state"]])


@quiet
@pytest.mark.parametrize(("full", "flat"), FORMS)
@pytest.mark.parametrize(("saver", "loader"), [("AdamW", "Lion"), ("Adam", "RAdam"), ("RAdam", "StableAdamW")])
def test_distributed_checkpoints_of_another_algorithm_raise(saver, loader, full, flat, tmp_path):
    with pytest.raises(ValueError, match=f"the state of {saver} cannot be loaded into {loader}"):
        distributed_pair(saver, full, flat, tmp_path, loader)


@quiet
@pytest.mark.combinations(1)
@pytest.mark.parametrize("by_distributed_checkpoint", [False, True])
@pytest.mark.parametrize(("rounding", "low_bits"), [("split", "remainder"), ("kahan", "compensation")])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_low_bits_are_copied_as_weights_are(name, rounding, low_bits, by_distributed_checkpoint):
    """Another optimizer that loaded the state must not change the FP32 weights of the one that it came from."""
    source, target = stepped(name, rounding=rounding), optimizer(name, rounding=rounding)
    if by_distributed_checkpoint:
        first, second = (nn.ParameterList(params_of(made)) for made in (source, target))
        set_optimizer_state_dict(second, target, get_optimizer_state_dict(first, source))
    else:
        target.load_state_dict(source.state_dict())
    before = [source.state[param][low_bits].clone() for param in params_of(source)]
    assert any(map(torch.any, before))
    for param, other in zip(params_of(source), params_of(target), strict=True):
        assert torch.equal(target.state[other][low_bits], source.state[param][low_bits])
    train(target, 3, seed=1)
    for param, other, low in zip(params_of(source), params_of(target), before, strict=True):
        assert torch.equal(source.state[param][low_bits], low)
        assert not torch.equal(target.state[other][low_bits], low)


# Parameters whose dtype changes under an optimizer.


@pytest.mark.parametrize(
    ("before", "after", "rounding"),
    [("float32", "bfloat16", "split"), ("float32", "float16", "kahan"), ("bfloat16", "float16", "kahan")],
)
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_parameter_cast_to_16_bits_trains_on_and_its_checkpoint_loads(name, before, after, rounding):
    params = [nn.Parameter(torch.linspace(-1, 1, 12, dtype=getattr(torch, before)).view(3, 4))]
    options = {"lr": 1e-3, "rounding": rounding, **OPTIONS.get(name, {})}
    made = ALGORITHMS[name](params, **options)
    train(made, 2)
    params[0].data = params[0].data.to(getattr(torch, after))
    train(made, 2)
    twin = ALGORITHMS[name]([nn.Parameter(params[0].detach().clone())], **options)
    twin.load_state_dict(copy.deepcopy(made.state_dict()))
    for other in (made, twin):
        train(other, 2, seed=1)
    assert_equal(everything(twin), everything(made))
    assert params[0].isfinite().all()
