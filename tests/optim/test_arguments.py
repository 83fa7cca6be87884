"""Arguments as text: what configuration files and command lines hold gives the optimizer that Python values give."""

import json
import pickle
from collections import UserDict, UserList
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

import hf_lowprec
from hf_lowprec.integrations.transformers.optim_args import optim_args_of
from hf_lowprec.optim import ALGORITHMS, AdamW, Muon
from hf_lowprec.optim.arguments import EXECUTION_ARGUMENTS, keywords

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
    cls, kwargs = hf_lowprec.optimizer_factory("adamw_bf16_kahan")
    args = SimpleNamespace(optim="adamw_bf16_kahan", optim_args=f"seed=0,{name}={form},eps=1e-8")
    if name in ("seed", "eps"):
        args.optim_args = f"{name}={form}"
    return cls([param()], **kwargs | {"first_parameter": 0} | optim_args_of(args).optimizer)


def of_factory(name, form):
    cls, kwargs = hf_lowprec.optimizer_factory("adamw_bf16_kahan", **{name: form})
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


@pytest.mark.parametrize("route", ["class", "group", "factory"])
@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("lr", "fast", r"lr='fast' is invalid; it must be a number >= 0"),
        ("lr", "", r"lr='' is invalid"),
        ("lr", "none", r"lr='none' is invalid"),
        ("eps", "1e-8|1e-8", r"eps='1e-8\|1e-8' is invalid"),
        ("betas", "0.9", r"betas=\(0.9,\) .*it must be 2 numbers, as \(0.9, 0.999\)"),
        ("betas", "0.9,much", r"betas\[1\]='much' is invalid; it must be a number >= 0 and < 1"),
        ("betas", [0.9, True], r"betas\[1\]=True is invalid"),
        ("amsgrad", "maybe", r"amsgrad='maybe' in param group 0 is not True or False"),
        ("amsgrad", 1, r"amsgrad=1 in param group 0 is not True or False"),
        ("seed", "1.5", r"seed='1.5' in param group 0 is not an integer"),
        ("first_parameter", "first", r"first_parameter='first' in param group 0 is not an integer"),
        ("rounding", "kahn", r"rounding='kahn' in param group 0 is unknown; valid are 'kahan', 'split'"),
        ("state_dtype", "float8", r"state_dtype='float8' .*; use bfloat16, float32 or int8, or one for each state"),
        ("state_dtype", "exp_avg:float8", r"state_dtype='float8' .*use bfloat16, float32 or int8"),
        ("state_dtype", "exp_avg:int8|float32", r"state_dtype names the state 'float32' .*has exp_avg, exp_avg_sq"),
        ("max_grad_norm", "high", r"max_grad_norm='high' is invalid; it must be a number > 0"),
        ("skip_nonfinite", "maybe", r"skip_nonfinite='maybe' is not True or False"),
        ("gradient_release", "maybe", r"gradient_release='maybe' is not True or False"),
    ],
)
def test_text_that_is_no_value_is_named(route, name, form, message):
    if route == "group" and name in EXECUTION_ARGUMENTS:
        pytest.skip("not an argument of groups")
    build = ROUTES[route]
    if route == "factory":
        build = lambda name, form: hf_lowprec.optimizer_factory("adamw_bf16_kahan", **{name: form})  # noqa: E731
    with pytest.raises(ValueError, match=message):
        build(name, form)


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
