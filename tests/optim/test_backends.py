"""Every backend agrees with `eager` bit for bit, whatever the algorithm, mode, layout and values.

`eager` runs on the CPU; `triton` on the GPU if there is one, else in Triton's interpreter, which computes with NumPy.
"""

import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.backends.triton import launch as triton_launch
from tests.support.optim.every_optimizer import NAMES, OPTIONS
from tests.support.optim.trained_everywhere import BF16, EVERY_MODE, FP32, VALUES, same, trained
from tests.support.triton_available import quiet_interpreter, require_triton

pytestmark = quiet_interpreter
OF_WHOLE_TENSORS = ("Adafactor", "Muon", "Prodigy", "StableAdamW")
"""Their updates depend on all elements of a tensor: one NaN reaches all of them."""

INT8 = torch.int8
MODES = [*EVERY_MODE, *((BF16, {"rounding": "kahan", "grad_dtype": FP32, **options}) for options in ({}, {"seed": -3}))]
MODES += [(BF16, {"rounding": "kahan", "max_grad_norm": 0.1}), (BF16, {"rounding": "split", "maximize": True})]
MODES += [(BF16, {"rounding": "kahan", "max_grad_norm": 1.0, "skip_nonfinite": True})]
PER_STATE = [{"exp_avg": INT8}, {"exp_avg_sq": INT8, "exp_avg": FP32}, {"exp_avg": FP32}, {"exp_avg_sq": FP32}]
SETTINGS = [(name, OPTIONS[name][0], mode) for name in NAMES for mode in MODES]
SETTINGS += [(name, options, MODES[k]) for k, name in enumerate(NAMES) for options in OPTIONS[name][1:]]
SETTINGS += [("AdamW", {}, (BF16, {"rounding": "split", "state_dtype": state_dtype})) for state_dtype in PER_STATE]
CASES = [
    (other, *settings, layouts[number % len(layouts)], VALUES[number // 3 % 3])
    for other, layouts, every in (("native", ("chunks", "edges", "strided"), 1), ("triton", ("small", "strided"), 3))
    for number, settings in enumerate(SETTINGS)
    if number % every == 0
]


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """In the interpreter, where each iteration takes milliseconds, a program has two of them instead of eight."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(triton_launch, "CHUNK", 2 * triton_launch.BLOCK)
        yield


@pytest.mark.parametrize(("other", "name", "options", "mode", "layout", "values"), CASES, ids=str)
def test_backends_agree(other, name, options, mode, layout, values):
    if other == "triton":
        require_triton()
        if name == "Muon" and torch.cuda.is_available():
            pytest.skip("matrix products are the device's own")
    dtype, arguments = mode
    arguments = {**options, **arguments}
    expected = trained(name, dtype, "eager", layout, values, **arguments)
    assert same(trained(name, dtype, other, layout, values, **arguments), expected)
    if values == "every kind" and layout in ("chunks", "small") and "max_grad_norm" not in arguments:
        for weight in expected[1:3]:
            assert weight.isnan().any() or name == "Muon"
            # Every ninth row got none of these values, and no element reads another one's, or another block's.
            assert weight[::9].isfinite().all() or name in OF_WHOLE_TENSORS


@pytest.mark.parametrize(("other", "layout"), [("native", "chunks"), ("triton", "small")])
@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_backends_agree_on_extreme_blocks_in_8_bits(other, layout, rounding):
    if other == "triton":
        require_triton()
    options = {"rounding": rounding, "state_dtype": INT8}
    assert same(*(trained("AdamW", BF16, backend, layout, "extreme", **options) for backend in (other, "eager")))


@pytest.mark.parametrize("name", NAMES)
def test_an_element_is_its_place_in_the_tensor_and_not_its_address(name):
    views, copies = (
        trained(name, BF16, "eager", layout, **OPTIONS[name][0]) for layout in ("strided", "strided, copied")
    )
    assert not views[0].is_contiguous() and copies[0].is_contiguous()
    assert same(views, copies)


def test_what_lies_between_the_elements_of_a_view_is_not_touched(any_backend):
    base = torch.linspace(-1, 1, 90).to(BF16)
    before = base.clone()
    param = nn.Parameter(base[1::3])
    optimizer = AdamW([param], lr=0.1, backend=any_backend)
    for _ in range(3):
        param.grad = torch.ones(90, dtype=BF16)[::3]
        optimizer.step()
    assert torch.equal(base[0::3], before[0::3])
    assert torch.equal(base[2::3], before[2::3])
    assert (base[1::3] != before[1::3]).all()
