"""Invalid arguments, keywords and groups, and what their error messages say."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_lowprec
from hf_lowprec.casting import cast_model
from hf_lowprec.optim import AdamW, Lion, Muon
from hf_lowprec.optim.backends.c import native
from hf_lowprec.optim.backends.c.compiler import CompilerError, require_compiler
from hf_lowprec.optim.state.fp32_weights import uses_low_bits
from hf_lowprec.optim.validation import check_scalars


def bf16(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(count, dtype=torch.bfloat16))]


HUGE = 10**5000  # of more digits than Python writes
NUMBERS = [
    ({"lr": 10**400}, r"lr=<an integer of 1329 bits> is invalid"),
    ({"weight_decay": HUGE}, r"weight_decay=<an integer of 16610 bits> is invalid"),
    ({"lr": 1e39}, r"lr=1e\+39 is invalid; it must be a number >= 0 that FP32 can hold \(up to 3.4e38\)"),
    ({"lr": torch.tensor(1e39, dtype=torch.float64)}, r"lr=tensor\(1.0000e\+39, dtype=torch.float64\) is invalid"),
    ({"eps": 1e39}, r"eps=1e\+39 is invalid"),
    ({"weight_decay": 1e39}, r"weight_decay=1e\+39 is invalid"),
    ({"max_grad_norm": 1e39}, r"max_grad_norm=1e\+39 is invalid"),
    *(
        ({name: value}, rf"{name}=.* is invalid")
        for name in ("lr", "eps", "weight_decay")
        for value in (1j, True, [1.0])
    ),
    ({"betas": (True, 0.9)}, r"betas\[0\]=True is invalid"),
    ({"lr": torch.tensor(1 + 1j)}, r"lr=tensor\(1.\+1.j\) is invalid"),
    ({"lr": torch.tensor(True)}, r"lr=tensor\(True\) is invalid"),
    ({"seed": True}, "seed=True in param group 0 is not an integer"),
    (
        {"lr": 1e38},
        r"lr=1e\+38 and the other hyperparameters give step_size=1e\+39, which FP32 cannot hold \(up to 3.4e38\)",
    ),
    ({"lr": 1e20, "weight_decay": 1e20}, r"lr=1e\+20 and the other hyperparameters give decay=1e\+40"),
]


@pytest.mark.parametrize(("arguments", "message"), NUMBERS, ids=[message for _, message in NUMBERS])
def test_numbers_that_fp32_cannot_hold_raise_when_the_optimizer_is_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdamW(bf16(), **arguments)


@pytest.mark.parametrize("kind", [float, torch.tensor, "numpy"], ids=["float", "tensor", "numpy"])
def test_numbers_of_every_type_are_accepted(kind):
    import numpy as np

    make = np.float32 if kind == "numpy" else kind
    found, expected = bf16(), bf16()
    for params, optimizer in (
        (found, AdamW(found, lr=make(0.5), eps=make(0.25), first_parameter=0)),
        (expected, AdamW(expected, 0.5, eps=0.25, first_parameter=0)),
    ):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    assert torch.equal(*found, *expected)


@pytest.mark.parametrize("cls", [AdamW, Muon, Lion])
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
@pytest.mark.parametrize("value", [True, False, None])
def test_arguments_of_other_libraries_are_answered(cls, name, why, value):
    params = [nn.Parameter(torch.ones(3, 3))]
    with pytest.raises(TypeError, match=f"{cls.__name__} got an unexpected keyword argument '{name}': {why}"):
        cls(params, **{name: value})
    with pytest.raises(ValueError, match=f"'{name}' in param group 0 is not an argument of {cls.__name__}: {why}"):
        cls([{"params": params, name: value}])


@pytest.mark.parametrize("options", [{}, {"gradient_release": True}], ids=str)
def test_a_step_that_a_cuda_graph_would_capture_raises(monkeypatch, options):
    param = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = AdamW([param], **options)

    def train():
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with monkeypatch.context() as during_capture:
        during_capture.setattr(torch.cuda, "is_initialized", lambda: True)
        during_capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="a CUDA graph cannot capture a step"):
            train()
    assert torch.equal(param, torch.ones_like(param)) and not optimizer.state
    optimizer.zero_grad()
    train()
    assert optimizer.state[param]["step"] == 1


def test_sr_is_the_short_name_of_stochastic_rounding():
    optimizer = AdamW([{"params": bf16()}, {"params": bf16(), "rounding": "kahan"}], rounding="sr")
    assert [group["rounding"] for group in optimizer.param_groups] == ["stochastic", "kahan"]
    assert optimizer.defaults["rounding"] == "stochastic"
    optimizer.add_param_group({"params": bf16(), "rounding": "sr"})
    assert optimizer.param_groups[2]["rounding"] == "stochastic"
    optimizer.param_groups[0]["rounding"] = "sr"  # later
    assert optimizer.state_dict()["param_groups"][0]["rounding"] == "stochastic"
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3).bfloat16()
    optimizer.step()
    _, kwargs = hf_lowprec.optimizer_factory("adamw_bf16_kahan", rounding="sr")
    assert kwargs["rounding"] == "stochastic"
    assert not uses_low_bits(kwargs)


def test_an_unknown_keyword_is_named_with_the_class():
    with pytest.raises(
        TypeError, match=r"^AdamW got an unexpected keyword argument 'weight_decoy'; did you mean 'weight_d"
    ):
        AdamW(bf16(), weight_decoy=0.1)
    with pytest.raises(TypeError, match=r"^Lion got an unexpected keyword argument 'nonsense'$"):
        Lion(bf16(), nonsense=1)


@pytest.mark.parametrize("name", ["backend", "max_grad_norm", "skip_nonfinite"])
def test_arguments_of_the_whole_optimizer_raise_in_a_group(name):
    with pytest.raises(ValueError, match=rf"'{name}' in param group 0 cannot be set per group; pass it to AdamW\("):
        AdamW([{"params": bf16(), name: None}])


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_learning_rate_that_a_scheduler_takes_below_zero_goes_on_as_in_torch(backend):
    ours, theirs = [nn.Parameter(torch.ones(3))], [nn.Parameter(torch.ones(3))]
    optimizers = AdamW(ours, lr=0.1, backend=backend), torch.optim.AdamW(theirs, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - 0.8 * step) for each in optimizers]
    for params, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
        for step in range(4):
            params[0].grad = torch.full((3,), 1.0 + step)
            optimizer.step()
            scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] < 0
    # Four steps of a dozen roundings of numbers below two.
    torch.testing.assert_close(ours[0], theirs[0], rtol=4 * 12 * 2**-24, atol=0)
    for bad in (float("nan"), float("-inf")):
        optimizers[0].param_groups[0]["lr"] = bad
        with pytest.raises(ValueError, match="lr="):
            optimizers[0].step()
    with pytest.raises(ValueError, match=r"lr=-0.1 is invalid; it must be a number >= 0$"):
        optimizers[0].add_param_group({"params": bf16(), "lr": -0.1})


def test_a_misspelt_group_key_is_named_and_foreign_keys_are_kept():
    with pytest.raises(ValueError, match=r"'roundin' in param group 0 is not an argument of.*did you mean 'rounding'"):
        AdamW([{"params": bf16(), "roundin": "nearest"}])
    optimizer = AdamW([{"params": bf16(), "name": "decoder", "initial_lr": 1e-3}])
    assert optimizer.param_groups[0]["name"] == "decoder"


def test_a_compiler_that_cc_names_is_not_replaced_by_another(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(CompilerError, match=r"\$CC='no-such-compiler -O2' is not a program.*backend='eager'"):
        AdamW(bf16(), backend="native")


def test_a_compiler_may_have_arguments(monkeypatch, tmp_path):
    path = require_compiler()[0]
    monkeypatch.setenv("CC", f"{path} -DNOTHING")
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path))
    native._load.cache_clear()
    params = bf16(5)
    params[0].grad = torch.ones_like(params[0])
    AdamW(params, backend="native").step()
    assert len(list(tmp_path.glob("*.so"))) == 1
    native._load.cache_clear()


@pytest.mark.parametrize("name", ["skip_nonfinite", "amsgrad"])
def test_booleans_of_python_and_numpy_are_accepted_and_others_raise(name):
    for value in (torch.tensor([True, False]), torch.tensor(True), 1, np.array([True, False])):
        with pytest.raises(ValueError, match=f"{name}=.*is not True or False"):
            AdamW(bf16(), **{name: value})
    AdamW(bf16(), **{name: np.bool_(True)})


def test_a_scalar_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match=r"lr=0.1 .* give gain=nan, which is not finite in FP32"):
        check_scalars({"lr": 0.1}, {"gain": float("nan")})


def test_a_device_without_fp64_is_named():
    with FakeTensorMode():
        param = nn.Parameter(torch.empty(4, dtype=torch.bfloat16, device="mps"))
        with pytest.raises(ValueError, match=r"param group 0 is on mps:0, .* no FP64.*use_cpu=True"):
            AdamW([param])


FP32, BF16 = torch.float32, torch.bfloat16


FIRST_IS_POINTED_OUT = [("split", FP32, 2), ("split", BF16, 2), ("kahan", FP32, 2), ("split", FP32, 1)]


@pytest.mark.parametrize(("rounding", "dtype", "sides"), FIRST_IS_POINTED_OUT)
def test_a_mode_for_16_bits_without_16_bit_weights_is_pointed_out(recwarn, rounding, dtype, sides):
    """Kahan summation is the default; vectors may be the norms of a model whose matrices another optimizer has."""
    from hf_lowprec.integrations.transformers.precision_report import precision_report

    param = nn.Parameter(torch.ones([4] * sides, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = AdamW([param], rounding=rounding)
    optimizer.step()
    found = [str(warning.message) for warning in recwarn if "cast_model(model)" in str(warning.message)]
    assert len(found) == ((rounding, dtype, sides) == FIRST_IS_POINTED_OUT[0])
    report = precision_report(nn.ParameterList([param]), optimizer, cast_model(nn.Linear(1, 1)))
    assert (f"weights {rounding}" in report) == (dtype == BF16)
