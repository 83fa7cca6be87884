"""The dtypes of states: of new ones, of those that are saved, and of those that are loaded, exact or to nearest."""

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_lowprec.optim import AdamW, Adan
from hf_lowprec.optim.sharding import FlatPart, set_flat_part
from hf_lowprec.optim.state import state_dict, states
from hf_lowprec.rounding import State
from tests.support.optim.every_optimizer import NAMES, OPTIONS, build
from tests.support.optim.optimizer_contents import assert_equal, everything, params_of, refuses, train
from tests.support.rounding import block_floats

INT8, UINT8, BF16, FP32 = torch.int8, torch.uint8, torch.bfloat16, torch.float32
SHAPES = [(6, 64), (2, 3, 32), (64,), (5, 40)]
"""Two whose rows are whole blocks, and two that have no states in 8 bits."""
FORMATS = {"exp_avg": block_floats.FIRST_MOMENT, "exp_avg_sq": block_floats.SECOND_MOMENT}
MOMENTS = (*FORMATS, "max_exp_avg_sq")
MIDDLE = block_floats.DRAWS // 2
"""The random number that rounds to nearest."""
NOTE = "saved states were converted to the settings of this AdamW"


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


# New states.

CODES = {"exp_avg_code": INT8, "exp_avg_scale": UINT8, "exp_avg_sq_code": INT8, "exp_avg_sq_scale": UINT8}
IN_BF16 = {"exp_avg": BF16, "exp_avg_sq": BF16, "remainder": torch.int16}


@pytest.mark.parametrize(
    ("shape", "dtype", "cls", "options", "expected"),
    [
        *(
            (shape, BF16, AdamW, {"amsgrad": True}, {**CODES, "max_exp_avg_sq": BF16, "remainder": torch.int16})
            for shape in [(3, 64), (2, 3, 32), (1, 32)]
        ),
        *((shape, BF16, AdamW, {}, IN_BF16) for shape in [(64,), (), (32, 3), (2, 33)]),
        ((2, 32), FP32, AdamW, {}, {"exp_avg": FP32, "exp_avg_sq": FP32}),
        (
            (2, 32),
            BF16,
            Adan,
            {"rounding": "stochastic", "state_dtype": {"exp_avg": INT8, "exp_avg_sq": FP32}},
            {"exp_avg_code": INT8, "exp_avg_scale": UINT8, "exp_avg_sq": FP32}
            | {"exp_avg_diff": BF16, "previous_grad": BF16},
        ),
    ],
)
def test_those_that_are_announced_are_created(shape, dtype, cls, options, expected):
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = cls([param], **{"state_dtype": INT8, **options})

    def announced() -> dict[str, torch.dtype]:
        return {each.key: each.dtype for each in states.state_tensors(optimizer, optimizer.param_groups[0], param)}

    assert announced() == expected
    train(optimizer, 1)
    created = {name: value.dtype for name, value in optimizer.state[param].items() if name != "step"}
    assert created == announced() == expected


def test_names_tell_which_states_are_nonnegative():
    """Files are read without the algorithm that wrote them."""
    for name in NAMES:
        optimizer = build(name, parameters(), lr=1e-2, **OPTIONS[name][0])
        for group in optimizer.param_groups:
            for state in optimizer.states(group):
                assert states.is_nonnegative(state.name) == state.nonnegative


# States that are loaded into an optimizer with a `state_dtype`.


def exact(name: str, state: dict) -> torch.Tensor:
    """The numbers of a state, in FP32."""
    if name in state:
        return state[name].float()
    stored = state[f"{name}_code"]
    format, codes = FORMATS[name], stored.view(UINT8).numpy().astype(np.int64)
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


def assert_converted(saved: torch.optim.Optimizer, loaded: AdamW, asked: dict[str, torch.dtype]) -> None:
    """The states of `loaded` are those of `saved` in the dtypes `asked` for, and nothing else has changed."""
    for param, theirs in zip(params_of(loaded), saved.state.values(), strict=True):
        own = {"step": theirs["step"].long()}
        own |= {key: value for key, value in theirs.items() if key in ("compensation", "remainder")}
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
    assert_converted(source, target, dict.fromkeys(MOMENTS, after))
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
    for optimizer in (again, target):
        train(optimizer, 2, seed=7)
    assert_equal(everything(again), everything(target))


@pytest.mark.parametrize("name", NAMES)
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


def test_states_of_torchs_optimizers_are_encoded():
    theirs, ours = torch.optim.AdamW(parameters(), lr=1e-2, amsgrad=True), adamw(state_dtype=INT8)
    train(theirs, 3)
    notes_of_loading(ours, theirs.state_dict())
    assert_converted(theirs, ours, dict.fromkeys(MOMENTS, INT8))
    train(ours, 1)


# Factored second moments.

MEANS = {"exp_avg_sq_row": -1, "exp_avg_sq_col": -2}


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "torch's"])
@pytest.mark.parametrize("state_dtype", [BF16, INT8])
def test_a_second_moment_becomes_its_means(state_dtype, theirs):
    """When it is loaded, or if the setting changes between two steps. What is saved then resumes bit for bit.

    Torch's is rounded to `state_dtype` before. Vectors keep their second moment.
    """
    options = {"amsgrad": False, "state_dtype": state_dtype}
    source = torch.optim.AdamW(parameters(), lr=1e-2) if theirs else adamw(**options)
    train(source, 3)
    params = [nn.Parameter(param.detach().clone()) for param in params_of(source)]
    target = adamw(params=params, factored=True, **options)
    notes = notes_of_loading(target, copy.deepcopy(source.state_dict()))
    assert any("exp_avg_sq to means over rows and columns" in note for note in notes)
    for param, old in zip(params_of(target), source.state.values(), strict=True):
        new, stored = target.state[param], expected("exp_avg_sq", old, dtype_of("exp_avg_sq", param, state_dtype))
        second = exact("exp_avg_sq", stored).double()
        assert {name for name in new if "_sq" in name} == ({"exp_avg_sq"} if param.ndim == 1 else {*MEANS})
        for name, dim in MEANS.items() if param.ndim > 1 else ():
            torch.testing.assert_close(new[name].double(), second.mean(dim, keepdim=True), rtol=2**-24, atol=0)
    train(target, 1)
    again = adamw(params=[nn.Parameter(param.detach().clone()) for param in params], factored=True, **options)
    assert notes_of_loading(again, copy.deepcopy(target.state_dict())) == []
    same = [target, again]
    if not theirs:
        source.param_groups[0]["factored"] = True
        train(source, 1)
        same.append(source)
    for optimizer in same:
        train(optimizer, 2, seed=7)
    for other in same[1:]:
        assert_equal(list(map(torch.Tensor.detach, params_of(other))), [param.detach() for param in params])
        assert_equal(other.state_dict()["state"], target.state_dict()["state"])


def test_means_become_a_second_moment_again():
    """The product of both, divided by the mean of all: exact where the second moment is such a product."""
    source, target = adamw(3, amsgrad=False, factored=True), adamw(amsgrad=False, state_dtype=FP32)
    (note,) = notes_of_loading(target, source.state_dict())
    assert note.startswith(NOTE) and "exp_avg_sq from its means" in note
    for old, new in zip(source.state.values(), target.state.values(), strict=True):
        if "exp_avg_sq_row" in old:
            row, column = (old[name].double() for name in MEANS)
            second = row * column / row.mean(-2, keepdim=True)
            torch.testing.assert_close(new["exp_avg_sq"].double(), second, rtol=3 * 2**-24, atol=0)
            assert not MEANS.keys() & new.keys()
    train(target, 1)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RAdam])
@pytest.mark.filterwarnings("ignore:the state dict that was loaded replaces options:RuntimeWarning")
def test_torchs_optimizers_do_not_take_codes_for_values(cls):
    source, theirs = build(cls.__name__, parameters(), state_dtype=INT8, backend="eager"), cls(parameters(), lr=1e-2)
    train(source, 1)
    theirs.load_state_dict(source.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        train(theirs, 1)
    assert_equal([param.detach() for param in params_of(theirs)], [param.detach() for param in parameters()])
    # The way out:
    decoded = build(cls.__name__, parameters(), state_dtype=FP32, backend="eager")
    with pytest.warns(RuntimeWarning, match="converted to the settings"):
        decoded.load_state_dict(source.state_dict())
    theirs = cls(parameters(FP32), lr=1e-2)
    theirs.load_state_dict(decoded.state_dict())
    for ours, state in zip(source.state.values(), theirs.state.values(), strict=True):
        assert torch.equal(state["exp_avg_sq"], exact("exp_avg_sq", ours))
    train(theirs, 1)


def test_without_a_state_dtype_states_keep_theirs():
    for before in (BF16, FP32, INT8):
        source, target = adamw(3, state_dtype=before), adamw()
        (note,) = notes_of_loading(target, source.state_dict())
        assert f"state_dtype={before!r} (was None)" in note
        assert "to convert them, set state_dtype before loading" in note
        assert_equal(target.state_dict(), source.state_dict())


def test_a_state_dtype_that_is_set_after_loading_is_that_of_new_states():
    """States that a parameter has stay as they are, and what was saved with states of two kinds can be loaded."""
    for saved, asked in ((INT8, BF16), (None, INT8), (FP32, INT8)):
        source, target, further = adamw(3, state_dtype=saved), adamw(), adamw()
        notes_of_loading(target, source.state_dict())
        target.param_groups[0]["state_dtype"] = asked
        train(target, 1)
        dtypes = [{k: v.dtype for k, v in state.items()} for state in target.state.values()]
        assert dtypes == [{k: v.dtype for k, v in state.items()} for state in source.state.values()]
        notes_of_loading(further, target.state_dict())
        assert_equal(further.state_dict()["state"], target.state_dict()["state"])


@pytest.mark.parametrize("asked", [INT8, {"exp_avg": INT8}])
def test_8_bits_replace_a_saved_rounding_to_nearest(asked):
    """The run that loads asked for 8 bits and not for nearest. An error would leave it no way to resume."""
    source, target = adamw(3, state_dtype=BF16, state_rounding="nearest"), adamw(state_dtype=asked)
    converted, replaced = notes_of_loading(target, source.state_dict())
    assert converted.startswith(NOTE)
    assert "in place of the saved state_rounding='nearest'" in replaced
    assert target.param_groups[0]["state_rounding"] == "stochastic"
    in_8_bits = asked if isinstance(asked, dict) else dict.fromkeys(FORMATS, INT8)
    assert_converted(source, target, dict.fromkeys(MOMENTS, BF16) | in_8_bits)
    train(target, 1)
    for other in (adamw(state_dtype=BF16), adamw()):
        notes = notes_of_loading(other, source.state_dict())
        assert any("state_rounding='nearest' (was 'stochastic')" in note for note in notes)
        assert other.param_groups[0]["state_rounding"] == "nearest"


def test_groups_and_states_of_their_own():
    source, target = adamw(3, state_dtype=FP32, rounding="split"), adamw(rounding="split")
    wanted = [{"exp_avg": INT8, "max_exp_avg_sq": FP32}, None]
    for optimizer, dtypes in ((source, [FP32, FP32]), (target, wanted)):
        (group,) = optimizer.param_groups
        optimizer.add_param_group({**group, "params": [group["params"].pop() for _ in range(2)][::-1]})
        for group, dtype in zip(optimizer.param_groups, dtypes, strict=True):
            group["state_dtype"] = dtype
    converted, replaced = sorted(notes_of_loading(target, source.state_dict()))
    assert "AdamW: exp_avg from float32 to int8, exp_avg_sq from float32 to bfloat16; values" in converted
    assert "state_dtype=torch.float32 (was None)" in replaced
    assert [group["state_dtype"] for group in target.param_groups] == [wanted[0], FP32]
    for number, (param, theirs) in enumerate(zip(params_of(target), source.state.values(), strict=True)):
        dtypes = {"exp_avg": INT8, "exp_avg_sq": BF16, "max_exp_avg_sq": FP32} if number < 2 else {}
        converted = {
            key: value for name, dtype in dtypes.items() for key, value in expected(name, theirs, dtype).items()
        }
        own = {key: value for key, value in theirs.items() if key not in dtypes} | converted
        assert target.state[param].keys() == own.keys()
        for key, value in own.items():
            assert_equal(target.state[param][key], value, key)
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


def changed(key: str, change, to: str | None = None):
    """A change of the entry `key` of a state, which may move `to` another key or, if `change` is None, away."""

    def apply(state: dict) -> None:
        value = state.pop(key)
        if change is not None:
            state[to or key] = change(value)

    return apply


WRONG_SCALES = "has shape (6, 1) in the state dict; the parameter has (6, 64), whose scales have (6, 2)"


@pytest.mark.parametrize(
    ("before", "after", "change", "words"),
    [
        (INT8, INT8, changed("exp_avg_scale", None), "has no 'exp_avg_scale'"),
        (INT8, BF16, changed("exp_avg_scale", None), "has no 'exp_avg_scale'"),
        (INT8, INT8, changed("exp_avg_code", None), "has no 'exp_avg_code'"),
        (INT8, INT8, changed("exp_avg_scale", lambda scale: scale[:, :1]), WRONG_SCALES),
        (INT8, INT8, changed("exp_avg_scale", torch.Tensor.int), "has dtype torch.int32; it must be uint8"),
        (INT8, INT8, changed("exp_avg_code", torch.Tensor.bfloat16), "has no 'exp_avg'"),
        (INT8, INT8, changed("compensation", torch.Tensor.char), "has no 'compensation_code'"),
        (FP32, INT8, changed("exp_avg_sq", lambda value: value[:, :32]), "has shape (6, 32)"),
        # Codes under the name of their state, as distributed checkpoints may convert them.
        (INT8, None, changed("exp_avg_code", torch.clone, to="exp_avg"), "has no 'exp_avg_code'"),
        (INT8, None, changed("exp_avg_code", torch.Tensor.bfloat16, to="exp_avg"), "exp_avg_scale', unknown"),
    ],
)
def test_damaged_states_are_refused(before, after, change, words):
    saved = copy.deepcopy(adamw(3, rounding="kahan", state_dtype=before).state_dict())
    target = adamw(rounding="kahan", state_dtype=after)
    change(saved["state"][0])
    refuses(lambda: target.load_state_dict(saved), target, ["parameter 0", words])


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


@pytest.mark.parametrize(("saved", "asked"), [(INT8, INT8), (INT8, None), (None, INT8)])
def test_distributed_checkpoints(saved, asked, tmp_path):
    """A distributed checkpoint is loaded into the tensors that the optimizer has, under their keys."""
    models = [nn.ParameterList(parameters()) for _ in range(2)]
    source, target = (
        adamw(params=list(model), state_dtype=dtype) for model, dtype in zip(models, (saved, asked), strict=True)
    )
    train(source, 3)
    dcp.save({"optimizer": get_optimizer_state_dict(models[0], source)}, checkpoint_id=tmp_path, no_dist=True)

    def load(state_dtype: torch.dtype | None = None) -> None:
        found = get_optimizer_state_dict(models[1], target)
        dcp.load({"optimizer": found}, checkpoint_id=tmp_path, no_dist=True)
        target.param_groups[0]["state_dtype"] = state_dtype or asked
        set_optimizer_state_dict(models[1], target, optim_state_dict=found)

    if saved == asked:
        load()
        assert_equal(target.state_dict(), source.state_dict())
    else:
        with pytest.raises(CheckpointException, match=r"exp_avg" if saved == INT8 else r"exp_avg\w*_code"):
            load()
    # The way out: the tensors get the dtypes of the checkpoint, and are converted when they are set.
    target.state.clear()
    target.param_groups[0]["state_dtype"] = saved
    reference = adamw(state_dtype=asked or BF16)
    notes_of_loading(reference, source.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(asked or BF16)
    assert_equal(target.state_dict(), reference.state_dict())


@pytest.mark.parametrize(("bounds", "in_8_bits"), [((0, 64, 128, 192), True), ((0, 64, 120, 192), False)])
def test_whether_a_state_is_in_8_bits_is_the_same_on_all_ranks(bounds, in_8_bits):
    """Ranks that hold parts of one parameter step it together, so the first must know where the others are cut."""
    part = nn.Parameter(torch.zeros(64, dtype=BF16))
    set_flat_part(part, FlatPart(0, "weight", torch.Size([6, 32]), 0, bounds, None))
    assert (states.why_not_8_bits(State("exp_avg", role=1), part) is None) is in_8_bits
