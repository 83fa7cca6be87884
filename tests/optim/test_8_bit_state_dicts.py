"""State dicts with states in 8 bits: codes and scales are kept bit for bit, and never taken for values."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.state.states import is_nonnegative, value_in
from tests.support.optim.every_optimizer import OPTIONS, build
from tests.support.optim.optimizer_contents import assert_equal, params_of, refuses, train

pytestmark = pytest.mark.filterwarnings("ignore:the state dict that was loaded replaces options:RuntimeWarning")

INT8, BF16, FP32 = torch.int8, torch.bfloat16, torch.float32
SHAPES = [(6, 64), (2, 3, 32), (64,), (5, 40)]
"""Two whose rows are whole blocks, and two that have no states in 8 bits."""


def parameters(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def adamw(steps: int = 3, **options) -> AdamW:
    optimizer = AdamW(parameters(), **{"lr": 1e-2, "state_dtype": INT8, "backend": "eager", **options})
    train(optimizer, steps)
    return optimizer


def test_a_state_dtype_that_is_set_after_loading_is_that_of_new_states():
    """States that a parameter has stay as they are, and what was saved with states of two kinds can be loaded."""
    for saved, asked in ((INT8, BF16), (None, INT8), (FP32, INT8)):
        source, target = adamw(state_dtype=saved), adamw(state_dtype=None, steps=0)
        target.load_state_dict(source.state_dict())
        target.param_groups[0]["state_dtype"] = asked
        train(target, 1)
        dtypes = [{k: v.dtype for k, v in state.items()} for state in target.state.values()]
        assert dtypes == [{k: v.dtype for k, v in state.items()} for state in source.state.values()]
        further = adamw(state_dtype=None, steps=0)
        further.load_state_dict(target.state_dict())
        assert_equal(further.state_dict()["state"], target.state_dict()["state"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("exp_avg_scale"), ["parameter 0", "has no 'exp_avg_scale'"]),
        (lambda state: state.pop("exp_avg_code"), ["parameter 0", "has no 'exp_avg_code'"]),
        (
            lambda state: state.update(exp_avg_scale=state["exp_avg_scale"][:, :1]),
            ["exp_avg_scale of parameter 0 has shape (6, 1)", "(6, 64), whose scales have (6, 2)"],
        ),
        (
            lambda state: state.update(exp_avg_scale=state["exp_avg_scale"].int()),
            ["exp_avg_scale of parameter 0 has dtype torch.int32; it must be uint8"],
        ),
        (
            lambda state: state.update(exp_avg_code=state["exp_avg_code"].bfloat16()),
            ["parameter 0", "has no 'exp_avg'"],
        ),
        (
            lambda state: state.update(compensation=state["compensation"].to(INT8)),
            ["parameter 0", "has no 'compensation_code'"],
        ),
    ],
)
def test_damaged_states_are_refused(change, words):
    source, target = adamw(), adamw()
    saved = copy.deepcopy(source.state_dict())
    change(saved["state"][0])
    refuses(lambda: target.load_state_dict(saved), target, words)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RAdam])
def test_torchs_optimizers_do_not_take_codes_for_values(cls):
    source, theirs = build(cls.__name__, parameters(), state_dtype=INT8, backend="eager"), cls(parameters(), lr=1e-2)
    train(source, 1)
    theirs.load_state_dict(source.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        train(theirs, 1)
    assert_equal([param.detach() for param in params_of(theirs)], [param.detach() for param in parameters()])
    # The way out:
    decoded = build(cls.__name__, parameters(), state_dtype=FP32, backend="eager")
    with pytest.warns(RuntimeWarning, match="converted to the state_dtype"):
        decoded.load_state_dict(source.state_dict())
    theirs = cls(parameters(FP32), lr=1e-2)
    theirs.load_state_dict(decoded.state_dict())
    for ours, state in zip(source.state.values(), theirs.state.values(), strict=True):
        assert torch.equal(state["exp_avg_sq"], value_in(ours, "exp_avg_sq"))
    train(theirs, 1)


@pytest.mark.parametrize(("dtype", "words"), [(INT8, "has no 'exp_avg_code'"), (BF16, "exp_avg_scale', unknown")])
def test_codes_under_the_name_of_their_state_are_refused(dtype, words):
    """As distributed checkpoints may convert them."""
    saved, target = adamw().state_dict(), adamw(steps=0, state_dtype=None)
    saved["state"][0]["exp_avg"] = saved["state"][0].pop("exp_avg_code").to(dtype)
    refuses(lambda: target.load_state_dict(saved), target, [words])


@pytest.mark.parametrize(("saved", "asked"), [(INT8, INT8), (INT8, None), (None, INT8)])
def test_distributed_checkpoints(saved, asked, tmp_path):
    """A distributed checkpoint is loaded into the tensors that the optimizer has, under their keys."""
    models = [nn.ParameterList(parameters()) for _ in range(2)]
    source, target = (
        AdamW(model.parameters(), lr=1e-2, state_dtype=dtype, backend="eager")
        for model, dtype in zip(models, (saved, asked), strict=True)
    )
    train(source, 3)
    dcp.save({"optimizer": get_optimizer_state_dict(models[0], source)}, checkpoint_id=tmp_path, no_dist=True)

    def load(before_setting: Callable[[], None] = lambda: None) -> None:
        found = get_optimizer_state_dict(models[1], target)
        dcp.load({"optimizer": found}, checkpoint_id=tmp_path, no_dist=True)
        before_setting()
        set_optimizer_state_dict(models[1], target, optim_state_dict=found)

    def give(dtype: torch.dtype | None) -> None:
        target.param_groups[0]["state_dtype"] = dtype

    if saved == asked:
        load()
        assert_equal(target.state_dict(), source.state_dict())
    else:
        with pytest.raises(CheckpointException, match=r"exp_avg" if saved == INT8 else r"exp_avg\w*_code"):
            load()
    # The way out: the tensors get the dtypes of the checkpoint, and are converted when they are set.
    target.state.clear()
    give(saved)
    load(lambda: give(asked or BF16))
    reference = AdamW(parameters(), lr=1e-2, state_dtype=asked or BF16, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.load_state_dict(source.state_dict())
    assert_equal(target.state_dict(), reference.state_dict())


def test_names_tell_which_states_are_nonnegative():
    """Files are read without the algorithm that wrote them."""
    for name in ALGORITHMS:
        optimizer = build(name, parameters(), lr=1e-2, **OPTIONS[name][0])
        for group in optimizer.param_groups:
            for state in optimizer.states(group):
                assert is_nonnegative(state.name) == state.nonnegative


@pytest.mark.filterwarnings("ignore:the state of torch:RuntimeWarning")
def test_states_of_torchs_optimizers_are_encoded():
    theirs = torch.optim.AdamW(parameters(), lr=1e-2)
    train(theirs, 3)
    ours = adamw(steps=0)
    ours.load_state_dict(theirs.state_dict())
    for (param, state), exact in zip(ours.state.items(), theirs.state.values(), strict=True):
        in_8_bits = param.dim() > 1 and param.shape[-1] % 32 == 0
        assert ("exp_avg_code" in state) == in_8_bits
        for name in ("exp_avg", "exp_avg_sq"):
            found = value_in(state, name).double()
            error = (found - exact[name].double()).abs() / exact[name].double().abs()
            # Half a spacing of 3 mantissa bits; values far below their block's maximum have 2.
            assert error.max() <= (1 / 8 if in_8_bits else 2.0**-9)
    train(ours, 1)
