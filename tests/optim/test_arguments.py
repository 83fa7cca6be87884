"""The arguments of optimizers: text gives the optimizer that Python values give, and what is invalid is refused.

Text is what configuration files and command lines hold. A refusal says the same wherever the value was given.
"""

import json
import pickle
import re
from collections import UserDict, UserList
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import hf_lowprec
from hf_lowprec.integrations.transformers.optim_args import optim_args_of
from hf_lowprec.optim import ALGORITHMS, AdamW, Lion, Muon
from hf_lowprec.optim.arguments import EXECUTION_ARGUMENTS, SHARED, keywords
from tests.support.optim.optimizer_contents import refuses, train

SECOND_IN_FP32 = {"exp_avg_sq": torch.float32}
TEXTS = [
    ("lr", 2e-5, ["2e-5", " 0.00002 "]),
    ("eps", 1e-6, ["1e-6"]),
    ("weight_decay", 0.0, ["0.0"]),
    ("betas", (0.9, 0.95), ["0.9|0.95", "0.9,0.95", "(0.9, 0.95)", "[0.9, 0.95]", [0.9, 0.95], ["9e-1", "0.95"]]),
    ("amsgrad", True, ["True", "true", "yes"]),
    ("maximize", False, ["False", "no"]),
    ("rounding", "stochastic", ["sr", "stochastic"]),
    ("state_dtype", torch.int8, ["int8", "torch.int8"]),
    ("state_dtype", torch.bfloat16, ["BF16", "bfloat16"]),
    ("state_dtype", None, ["none", "null", "None"]),
    ("state_dtype", SECOND_IN_FP32, ["exp_avg_sq:float32", '{"exp_avg_sq": "fp32"}', "{'exp_avg_sq': torch.float32}"]),
    ("state_dtype", SECOND_IN_FP32, ["{exp_avg_sq: float32}", {"exp_avg_sq": "float32"}]),
    ("state_dtype", {"exp_avg": torch.int8, **SECOND_IN_FP32}, ["exp_avg:int8|exp_avg_sq:float32"]),
    ("state_dtype", {"exp_avg": torch.int8, **SECOND_IN_FP32}, ["{'exp_avg': 'int8', 'exp_avg_sq': 'fp32'}"]),
    ("seed", 3, ["3"]),
    ("first_parameter", 7, ["7"]),
    ("max_grad_norm", 0.5, ["0.5"]),
    ("max_grad_norm", None, ["null"]),
    ("skip_nonfinite", True, ["true"]),
    ("gradient_release", True, ["True"]),
    ("gradient_release", False, ["False"]),
]


def param() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 32, dtype=torch.bfloat16))


def settings(optimizer) -> str:
    """All that the arguments of a constructor set, with the types of the values."""
    groups = [
        sorted((key, value) for key, value in group.items() if key != "params") for group in optimizer.param_groups
    ]
    return repr((groups, sorted((name, getattr(optimizer, name)) for name in EXECUTION_ARGUMENTS)))


def of_optim_args(name, form):
    cls, kwargs = hf_lowprec.optimizer_factory("adamw_bf16_split")
    args = SimpleNamespace(optim="adamw_bf16_split", optim_args=f"seed=0,{name}={form},eps=1e-8")
    if name in ("seed", "eps"):
        args.optim_args = f"{name}={form}"
    return cls([param()], **kwargs | {"first_parameter": 0} | optim_args_of(args).optimizer)


def of_factory(name, form):
    cls, kwargs = hf_lowprec.optimizer_factory("adamw_bf16_split", **{name: form})
    assert cls is AdamW
    return cls([param()], **{"first_parameter": 0, **kwargs})


def of_text(read):
    """A constructor with the value of a file that `read` parses."""

    def build(name, form):
        text = json.dumps({name: form}) if read is json.loads or not isinstance(form, str) else f"{name}: {form}"
        return AdamW([param()], **{"first_parameter": 0, **read(text)})

    return build


ROUTES = {
    "class": lambda name, form: AdamW([param()], **{"first_parameter": 0, name: form}),
    "group": lambda name, form: AdamW([{"params": [param()], name: form}], first_parameter=0),
    "factory": of_factory,
    "optim_args": of_optim_args,
    "yaml": of_text(yaml.safe_load),
    "json": of_text(json.loads),
}
FORMS = [(name, value, form) for name, value, forms in TEXTS for form in forms]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("name", "value", "form"), FORMS, ids=[f"{name}={form}" for name, _, form in FORMS])
def test_text_gives_the_settings_of_python_values(route, name, value, form):
    if route == "group" and name in EXECUTION_ARGUMENTS:
        pytest.skip("not an argument of groups")
    expected = ROUTES["group" if route == "group" else "class"](name, value)
    found = ROUTES[route](name, form)
    assert settings(found) == settings(expected)
    if name != "gradient_release":
        assert repr(found.defaults) == repr(expected.defaults)
    assert found.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    assert settings(pickle.loads(pickle.dumps(found))) == settings(expected)


@pytest.mark.parametrize("cls", ALGORITHMS.values())
def test_the_defaults_of_every_algorithm_can_be_written_as_text(cls):
    texts = {name: str(default) for name, default in keywords(cls).items() if name != "matrices"}
    assert settings(cls([param()], **texts | {"first_parameter": "0"})) == settings(cls([param()], first_parameter=0))


def test_a_flag_of_a_group_is_text():
    groups = Muon([{"params": [param()], "use_muon": "0"}, {"params": [param()], "use_muon": "True"}]).param_groups
    assert [group["use_muon"] for group in groups] == [False, True]
    assert AdamW([{"params": [param()], "name": "none"}]).param_groups[0]["name"] == "none"


NO_NUMBERS = ["fast", "", "none", "1e-8|1e-8", 1j, True, [1.0], 1e39, -1.0, float("nan")]
NO_BOOLEANS = ["maybe", 1, torch.tensor(True), torch.tensor([True, False]), np.array([True, False])]
REFUSED = [
    *((name, value, "{name}={value!r} is invalid; it must be a number >= 0")
      for name in ("lr", "eps", "weight_decay") for value in NO_NUMBERS),
    *((name, value, "{name}={value!r} in param group 0 is not True or False")
      for name in ("amsgrad", "maximize") for value in NO_BOOLEANS),
    *((name, value, "{name}={value!r} is not True or False")
      for name in ("skip_nonfinite", "gradient_release", "offload_states") for value in NO_BOOLEANS),
    *((name, value, "{name}={value!r} in param group 0 is not an integer")
      for name in ("seed", "first_parameter") for value in ("1.5", 1.5, True)),
    *(("betas", (value, 0.9), "betas[0]={value[0]!r} is invalid; it must be a number >= 0 and < 1")
      for value in ("much", True, 1.0, -0.1)),
    ("lr", 1e39, "a number >= 0 that FP32 can hold (up to 3.4e38)"),
    ("lr", 10**400, "0 is invalid; it must be a number >= 0 that FP32 can hold"),
    *(("lr", torch.tensor(value), "is invalid; it must be a number") for value in (1 + 1j, True, [0.1, 0.1])),
    ("lr", 1e38, "lr=1e+38 and the other hyperparameters give step_size=1e+39, which FP32 cannot hold (up to 3.4e38)"),
    ("betas", "0.9", "betas=(0.9,) in param group 0 is invalid; it must be 2 numbers, as (0.9, 0.999)"),
    ("first_parameter", -1, "first_parameter=-1 is invalid; it must be an integer >= 0"),
    ("rounding", "kahn", "rounding='kahn' in param group 0 is unknown; valid are 'kahan', 'split', 'stochastic'"),
    ("rounding", None, "rounding=None in param group 0 is unknown; valid are 'kahan', 'split', 'stochastic'"),
    ("state_rounding", "kahan", "state_rounding='kahan' in param group 0 is unknown; valid are 'stochastic'"),
    *(("state_dtype", value, "state_dtype={value} in param group 0 is not supported; use bfloat16, float32 or int8")
      for value in (torch.float16, torch.int32, torch.uint8)),
    ("state_dtype", {"velocity": "fp32"}, "state_dtype names the state 'velocity' in param group 0"),
    ("state_dtype", "float8", "state_dtype='float8' in param group 0 is not supported; use bfloat16, float32 or int8"),
    ("state_dtype", "exp_avg:float8", "state_dtype='float8' in param group 0 is not supported"),
    ("state_dtype", "exp_avg:int8|float32", "state_dtype names the state 'float32' in param group 0; this"),
    *(("max_grad_norm", value, "max_grad_norm={value!r} is invalid; it must be a number > 0")
      for value in ("high", 0.0, -1.0, 1e39)),
    ("clip", "norm", "clip='norm' is unknown; valid are 'exact', 'delayed'"),
    ("backend", "cuda", "backend='cuda' is unknown; valid are 'auto', 'triton', 'native', 'eager'"),
]  # fmt: skip


@pytest.mark.parametrize("route", ["class", "group", "factory"])
@pytest.mark.parametrize(("name", "value", "message"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_no_value_is_refused_in_the_same_words_everywhere(route, name, value, message):
    build = ROUTES[route]
    if route == "group" and name in EXECUTION_ARGUMENTS:
        build, message = ROUTES["group"], "{name!r} in param group 0 cannot be set per group; pass it to AdamW(...)"
    elif route == "factory":
        build = lambda name, value: hf_lowprec.optimizer_factory("adamw_bf16_kahan", **{name: value})  # noqa: E731
    with pytest.raises(ValueError, match=re.escape(message.format(name=name, value=value))):
        build(name, value)


NONNEGATIVE, SHARE = ("a number >= 0", [-1e-9], [0.0]), ("a number >= 0 and < 1", [-1e-9, 1.0], [0.0, 0.999])
RANGES = {
    **dict.fromkeys(["lr", "eps", "weight_decay", "square_eps", "d_coef", "ns_eps"], NONNEGATIVE),
    **dict.fromkeys(["betas", "beta1", "Muon momentum"], SHARE),
    **dict.fromkeys(["dampening", "ns_coefficients"], ("a number", [], [-1.0, 2.0])),
    "SGD momentum": ("a number >= 0", [-1e-9], [0.0, 1.0]),
    "beta2_decay": ("a number <= 0", [1e-9], [0.0, -2.0]),
    "d": ("a number >= 1", [0.99], [1.0]),
    "d0": ("a number > 0", [0.0, -1.0], [1e-9]),
    "warmup_steps": ("an integer >= 0", [-1], [0, 3]),
    "ns_steps": ("an integer >= 1 and < 100", [0, 100], [1, 99]),
}
"""Hyperparameters → what is valid in words, the first values that are not, and the last that are."""
HYPERPARAMETERS = [
    (algorithm, name)
    for algorithm, cls in ALGORITHMS.items()
    for name in keywords(cls).keys() - SHARED.keys() - {"matrices", "adjust_lr_fn"}
]


@pytest.mark.parametrize(("algorithm", "name"), sorted(HYPERPARAMETERS))
def test_hyperparameters_out_of_their_ranges_are_refused_and_leave_no_trace(algorithm, name):
    cls, default = ALGORITHMS[algorithm], keywords(ALGORITHMS[algorithm])[name]
    optimizer = cls([nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))])
    train(optimizer, 1)
    if isinstance(default, bool):
        words, refused, accepted = "not True or False", NO_BOOLEANS, [default]
    else:
        words, outside, accepted = RANGES.get(f"{algorithm} {name}") or RANGES[name]
        refused = [*outside, "fast", True, 1j, float("nan"), float("inf")]
    if isinstance(default, tuple):
        places = range(len(default))
        refused = [(*default[:k], value, *default[k + 1 :]) for k in places for value in refused]
        refused += [default[0], default[1:], (*default, 0.5)]
        accepted = [(*default[:k], value, *default[k + 1 :]) for k in places[1:] for value in accepted]
    for value in refused:
        with pytest.raises(ValueError, match=rf"^{name}.*(not an integer|{words}|must be \d numbers)"):
            cls([nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))], **{name: value})
        group = {"params": [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))], name: value}
        refuses(lambda group=group: optimizer.add_param_group(group), optimizer, [name])
    for value in accepted:
        cls([nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))], **{name: value})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("foreach", "a step handles all parameters together in any case; remove it"),
        ("fused", "every backend is fused, so there is nothing to choose; remove it"),
        ("capturable", "steps are not captured in CUDA graphs; remove it"),
        ("differentiable", "rounding has no useful gradient, so steps are not differentiable; remove it"),
        ("kahan_sum", "the rounding mode is an argument of its own; use rounding='kahan'"),
        ("bf16_stochastic_round", "the rounding mode is an argument of its own; use rounding='stochastic'"),
        ("decouple_lr", "weight decay is multiplied by the learning rate; use weight_decay=d / lr"),
    ],
)
def test_arguments_of_other_libraries_are_answered(name, why):
    for algorithm, cls in ALGORITHMS.items():
        params = [nn.Parameter(torch.ones(3, 3))]
        with pytest.raises(TypeError, match=f"{algorithm} got an unexpected keyword argument '{name}': {why}"):
            cls(params, **{name: None})
        with pytest.raises(ValueError, match=f"'{name}' in param group 0 is not an argument of {algorithm}: {why}"):
            cls([{"params": params, name: False}])
        with pytest.raises(ValueError, match=f"'{name}' is not an argument of '{algorithm.lower()}_bf16_sr': {why}"):
            hf_lowprec.optimizer_factory(f"{algorithm.lower()}_bf16_sr", **{name: True})


def test_a_misspelt_argument_is_named_with_the_closest_and_other_keys_of_groups_are_kept():
    with pytest.raises(
        TypeError, match=r"^AdamW got an unexpected keyword argument 'weight_decoy'; did you mean 'weight_"
    ):
        AdamW([param()], weight_decoy=0.1)
    with pytest.raises(TypeError, match=r"^Lion got an unexpected keyword argument 'nonsense'$"):
        Lion([param()], nonsense=1)
    with pytest.raises(
        ValueError, match=r"^'roundin' in param group 0 is not an argument of AdamW; did you mean 'rounding'\?$"
    ):
        AdamW([{"params": [param()], "roundin": "nearest"}])
    group = {"params": [param()], "name": "decoder", "initial_lr": 1e-3}
    kept = AdamW([group]).param_groups[0]
    assert (kept["name"], kept["initial_lr"]) == ("decoder", 1e-3)


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32], ids=["float", "tensor", "numpy"])
def test_numbers_of_every_type_are_accepted(kind):
    found, expected = param(), param()
    for weight, optimizer in (
        (found, AdamW([found], lr=kind(0.5), eps=kind(0.25), amsgrad=np.bool_(True), first_parameter=0)),
        (expected, AdamW([expected], 0.5, eps=0.25, amsgrad=True, first_parameter=0)),
    ):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(found, expected)


def test_sr_is_the_short_name_of_stochastic_rounding():
    optimizer = AdamW([{"params": [param()]}, {"params": [param()], "rounding": "kahan"}], rounding="sr")
    assert optimizer.defaults["rounding"] == "stochastic"
    optimizer.add_param_group({"params": [param()], "rounding": "sr"})
    assert [group["rounding"] for group in optimizer.param_groups] == ["stochastic", "kahan", "stochastic"]
    optimizer.param_groups[0]["rounding"] = "sr"  # later
    assert optimizer.state_dict()["param_groups"][0]["rounding"] == "stochastic"
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 32).bfloat16()
    optimizer.step()
    assert hf_lowprec.optimizer_factory("adamw_bf16_kahan", rounding="sr")[1]["rounding"] == "stochastic"


def test_a_learning_rate_that_is_a_tensor_stays_one():
    lr = torch.tensor(1e-3)
    assert AdamW([param()], lr=lr).param_groups[0]["lr"] is lr
    assert hf_lowprec.optimizer_factory("adamw_bf16_split", lr=lr)[1]["lr"] is lr


def test_a_pair_of_the_factory_is_checked_and_names_matrices_of_a_model():
    with pytest.raises(ValueError, match="skip_nonfinite=True needs all gradients"):
        hf_lowprec.optimizer_factory("adamw_bf16_sr", skip_nonfinite="true", gradient_release="true")
    matrices = [param()]
    assert hf_lowprec.optimizer_factory("muon_bf16_kahan", matrices=matrices)[1]["matrices"] is matrices


def test_containers_of_a_configuration_library_are_those_of_python():
    expected = AdamW([param()], rounding="split", betas=(0.9, 0.95), state_dtype=torch.int8, first_parameter=0)
    given = UserDict(rounding="split", betas=UserList([0.9, 0.95]), state_dtype="torch.int8", first_parameter=0)
    assert settings(AdamW([param()], **given)) == settings(expected)
    by_state = UserDict(exp_avg="int8", exp_avg_sq="float32")
    assert type(AdamW([param()], state_dtype=by_state).param_groups[0]["state_dtype"]) is dict
