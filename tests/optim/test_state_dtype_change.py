"""Loading saved states into an optimizer with another `state_dtype`: they are converted, exactly or to nearest."""

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.state import state_dict, states
from tests.support.optim.every_optimizer import OPTIONS, build
from tests.support.optim.optimizer_contents import assert_equal, everything, params_of, refuses, train
from tests.support.rounding import block_floats

INT8, BF16, FP32 = torch.int8, torch.bfloat16, torch.float32
SHAPES = [(6, 64), (2, 3, 32), (64,), (5, 40)]
"""Two whose rows are whole blocks, and two that have no states in 8 bits."""
FORMATS = {"exp_avg": block_floats.FIRST_MOMENT, "exp_avg_sq": block_floats.SECOND_MOMENT}
MIDDLE = block_floats.DRAWS // 2
"""The random number that rounds to nearest."""
NOTE = "saved states were converted to the state_dtype that this AdamW was given"


def parameters(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def adamw(steps: int = 0, params=None, **options) -> AdamW:
    optimizer = AdamW(params or parameters(), **{"lr": 1e-2, "backend": "eager", "amsgrad": True, **options})
    train(optimizer, steps)
    return optimizer


def notes_of_loading(target: AdamW, saved: dict) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        target.load_state_dict(saved)
    return [str(each.message) for each in caught]


def exact(name: str, state: dict) -> torch.Tensor:
    """The numbers of a state, in FP32."""
    if name in state:
        return state[name].float()
    stored = state[f"{name}_code"]
    format, codes = FORMATS[name], stored.view(torch.uint8).numpy().astype(np.int64)
    scales = state[f"{name}_scale"].numpy().astype(np.int64)
    values = block_floats.decode(format, codes.reshape(-1, 32), scales.reshape(-1))
    return torch.from_numpy(values).view(stored.shape)


def expected(name: str, state: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state `name` in `dtype`, by torch's own cast or by the reference of the 8-bit format."""
    value = exact(name, state)
    if dtype != INT8:
        return {name: value.to(dtype)}
    blocks = value.numpy().reshape(-1, 32)
    codes, scales = block_floats.encode(FORMATS[name], blocks, np.full(blocks.shape, MIDDLE))
    return {
        f"{name}_code": torch.from_numpy(codes.astype(np.uint8)).view(INT8).view(value.shape),
        f"{name}_scale": torch.from_numpy(scales.astype(np.uint8)).view(*value.shape[:-1], -1),
    }


def dtype_of(name: str, param: torch.Tensor, asked: torch.dtype) -> torch.dtype:
    """The dtype that a new state of a 16-bit `param` has."""
    in_8_bits = name in FORMATS and param.dim() > 1 and param.shape[-1] % 32 == 0
    return BF16 if asked == INT8 and not in_8_bits else asked


def assert_converted(saved: AdamW, loaded: AdamW, asked: dict[str, torch.dtype]) -> None:
    """The states of `loaded` are those of `saved` in the dtypes `asked` for, and nothing else has changed."""
    for param, theirs in zip(params_of(loaded), saved.state.values(), strict=True):
        own = {"step": theirs["step"]} | {k: v for k, v in theirs.items() if k in ("compensation", "remainder")}
        for name, dtype in asked.items():
            own |= expected(name, theirs, dtype_of(name, param, dtype))
        assert loaded.state[param].keys() == own.keys()
        for name, value in own.items():
            assert_equal(loaded.state[param][name], value, name)


@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic"])
@pytest.mark.parametrize(("before", "after"), [*itertools.product([BF16, FP32, INT8], repeat=2)])
def test_every_direction(before, after, rounding):
    source, target = adamw(3, state_dtype=before, rounding=rounding), adamw(state_dtype=after, rounding=rounding)
    saved = source.state_dict()
    contents = copy.deepcopy(saved)
    notes = notes_of_loading(target, saved)
    assert_equal(saved, contents)
    assert target.param_groups[0]["state_dtype"] == after
    if before == after:
        assert notes == []
        assert_equal(target.state_dict(), saved)
        return
    assert_converted(source, target, dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), after))
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in (BF16, FP32, INT8)}
    (note,) = notes
    assert note.startswith(NOTE)
    assert f"exp_avg from {names[before]} to {names[after]}" in note
    assert ("max_exp_avg_sq" in note) == (FP32 in (before, after))
    train(target, 1)
    # What is saved then resumes without a conversion, bit for bit.
    weights = [nn.Parameter(param.detach().clone()) for param in params_of(target)]
    again = adamw(params=weights, state_dtype=after, rounding=rounding)
    assert notes_of_loading(again, copy.deepcopy(target.state_dict())) == []
    train(again, 2, seed=7)
    train(target, 2, seed=7)
    assert_equal(everything(again), everything(target))


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize(("before", "after"), [(FP32, INT8), (INT8, BF16)])
def test_every_algorithm_gets_the_dtypes_of_a_new_optimizer(name, before, after):
    def built(dtype: torch.dtype, steps: int) -> torch.optim.Optimizer:
        optimizer = build(name, parameters(), lr=1e-2, state_dtype=dtype, backend="eager", **OPTIONS[name][0])
        train(optimizer, steps)
        return optimizer

    target, new = built(after, 0), built(after, 3)
    with pytest.warns(RuntimeWarning, match="saved states were converted"):
        target.load_state_dict(built(before, 3).state_dict())
    for ours, theirs in zip(map(target.state.get, params_of(target)), new.state.values(), strict=True):
        assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in theirs.items()}
    train(target, 1)


def test_without_a_state_dtype_states_keep_theirs():
    for before in (BF16, FP32, INT8):
        source, target = adamw(3, state_dtype=before), adamw()
        (note,) = notes_of_loading(target, source.state_dict())
        assert f"state_dtype={before!r} (was None)" in note
        assert "to convert them, set state_dtype before loading" in note
        assert_equal(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("asked", [INT8, {"exp_avg": INT8}])
def test_8_bits_replace_a_saved_rounding_to_nearest(asked):
    """The run that loads asked for 8 bits and not for nearest. An error would leave it no way to resume."""
    source, target = adamw(3, state_dtype=BF16, state_rounding="nearest"), adamw(state_dtype=asked)
    converted, replaced = notes_of_loading(target, source.state_dict())
    assert converted.startswith(NOTE)
    assert "in place of the saved state_rounding='nearest'" in replaced
    assert target.param_groups[0]["state_rounding"] == "stochastic"
    in_8_bits = asked if isinstance(asked, dict) else dict.fromkeys(FORMATS, INT8)
    assert_converted(source, target, dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), BF16) | in_8_bits)
    train(target, 1)
    for other in (adamw(state_dtype=BF16), adamw()):
        notes = notes_of_loading(other, source.state_dict())
        assert any("state_rounding='nearest' (was 'stochastic')" in note for note in notes)
        assert other.param_groups[0]["state_rounding"] == "nearest"


def test_groups_and_states_of_their_own():
    source, target = adamw(3, state_dtype=FP32, rounding="split"), adamw(rounding="split")
    wanted = [{"exp_avg": INT8, "max_exp_avg_sq": FP32}, None]

    def groups(optimizer: AdamW, dtypes: list) -> None:
        (group,) = optimizer.param_groups
        rest = {**group, "params": [group["params"].pop() for _ in range(2)][::-1]}
        optimizer.add_param_group(rest)
        for group, dtype in zip(optimizer.param_groups, dtypes, strict=True):
            group["state_dtype"] = dtype

    groups(source, [FP32, FP32])
    groups(target, wanted)
    converted, replaced = sorted(notes_of_loading(target, source.state_dict()))
    assert converted.endswith(": exp_avg from float32 to int8, exp_avg_sq from float32 to bfloat16")
    assert "state_dtype=torch.float32 (was None)" in replaced
    assert [group["state_dtype"] for group in target.param_groups] == [wanted[0], FP32]
    for number, (param, theirs) in enumerate(zip(params_of(target), source.state.values(), strict=True)):
        own = target.state[param]
        if number >= 2:
            assert_equal(own, theirs)
            continue
        for name, dtype in {"exp_avg": INT8, "exp_avg_sq": BF16, "max_exp_avg_sq": FP32}.items():
            for key, value in expected(name, theirs, dtype).items():
                assert_equal(own[key], value)
    train(target, 1)


def test_fp32_parameters_have_fp32_states_whatever_is_asked_for():
    source = adamw(3, params=parameters(FP32), state_dtype=BF16)
    target = adamw(params=parameters(FP32), state_dtype=INT8)
    assert notes_of_loading(target, source.state_dict()) == []
    assert_equal(target.state_dict()["state"], source.state_dict()["state"])


def test_states_of_the_user_and_of_options_that_are_off_stay():
    source, target = adamw(3, state_dtype=FP32), adamw(state_dtype=BF16)
    source.param_groups[0]["amsgrad"] = False
    saved = source.state_dict()
    for param, state in zip(params_of(target), saved["state"].values(), strict=True):
        target.state[param]["mine"] = state["mine"] = torch.full((3,), 1 / 3)
    notes_of_loading(target, saved)
    for ours, theirs in zip(target.state.values(), saved["state"].values(), strict=True):
        assert_equal(ours["mine"], theirs["mine"])
        assert_equal(ours["max_exp_avg_sq"], theirs["max_exp_avg_sq"])
        assert ours["exp_avg"].dtype == BF16


@pytest.mark.parametrize(
    ("before", "after", "change", "words"),
    [
        (INT8, BF16, lambda saved: saved["state"][0].pop("exp_avg_scale"), ["parameter 0", "no 'exp_avg_scale'"]),
        (
            FP32,
            INT8,
            lambda saved: saved["state"][1].update(exp_avg_sq=torch.zeros(6, 32)),
            ["exp_avg_sq of parameter 1 has shape (6, 32)", "(2, 3, 32)"],
        ),
    ],
)
def test_what_cannot_be_converted_leaves_the_optimizer_unchanged(before, after, change, words):
    saved = copy.deepcopy(adamw(3, state_dtype=before).state_dict())
    change(saved)
    target = adamw(1, state_dtype=after)
    refuses(lambda: target.load_state_dict(saved), target, words)


def test_a_lack_of_memory_leaves_the_optimizer_unchanged(monkeypatch):
    original, calls = state_dict.in_own_dtypes, []

    def out_of_memory(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return original(*arguments)

    monkeypatch.setattr(state_dict, "in_own_dtypes", out_of_memory)
    saved, target = adamw(3, state_dtype=FP32).state_dict(), adamw(1, state_dtype=INT8)
    refuses(lambda: target.load_state_dict(saved), target, ["out of memory"])


def test_large_states_are_encoded_in_parts(monkeypatch):
    value = torch.randn((7, 96), generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = states.stored_as(value, INT8, "exp_avg")
    monkeypatch.setattr(states, "chunk_size", lambda device: 64)
    assert_equal(states.stored_as(value, INT8, "exp_avg"), whole)
    strided = value[:, ::3]
    assert_equal(states.stored_as(strided, INT8, "exp_avg"), states.stored_as(strided.clone(), INT8, "exp_avg"))
