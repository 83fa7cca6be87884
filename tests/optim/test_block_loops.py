"""The loops into which a step with states in 8 bits is divided."""

import re

import pytest
import torch

from hf_lowprec.optim import SGD, AdamW, Adan, Lion
from hf_lowprec.optim.backends.c.block_loops import BlockLoop, block_loops, render_block_loops
from hf_lowprec.optim.backends.trace import trace
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.rounding import MODES

ALGORITHMS = pytest.mark.parametrize(
    ("cls", "options"), [(AdamW, {}), (Adan, {}), (Lion, {}), (SGD, {"momentum": 0.9})], ids=lambda v: str(v)[-16:]
)
BF16_MODES = pytest.mark.parametrize("rounding", list(MODES))


def spec_of(cls, rounding: str, options: dict) -> KernelSpec:
    param = torch.nn.Parameter(torch.zeros(2, 32, dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    optimizer = cls([param], lr=1e-3, rounding=rounding, state_dtype=torch.int8, backend="eager", **options)
    with optimizer.plan_step() as plan:
        (group,) = plan.fused_groups
    return group.spec


def loops_of(cls, rounding: str, options: dict) -> list[BlockLoop]:
    spec = spec_of(cls, rounding, options)
    return block_loops(trace(spec), spec.tensors.keys() - set(spec.scales.values()))


@ALGORITHMS
@BF16_MODES
def test_all_inputs_are_loaded_before_any_output_is_stored(cls, options, rounding):
    """Outputs overwrite inputs, so an input that a later loop loads could be the new value."""
    first, *later = loops_of(cls, rounding, options)
    assert first.loaded
    assert not any(loop.loaded for loop in later)


@ALGORITHMS
@BF16_MODES
def test_no_value_is_kept_that_follows_from_another_value_that_is_kept(cls, options, rounding):
    """Unless the loop that computes it needs it as well."""
    loops = loops_of(cls, rounding, options)
    assert len(loops) == 2
    kept = set(loops[0].kept)
    assert kept
    for node in kept:
        needed_before = {*loops[0].operations, *loops[0].maxima}
        if not needed_before.intersection(node.users):
            assert not kept.intersection(node.all_input_nodes)


def test_adamw_keeps_its_random_word_and_three_patterns():
    """The first moment with and without its sign, and the second moment."""
    first, second = loops_of(AdamW, "kahan", {})
    assert len(first.kept) == 4
    assert second.restored == first.kept


@ALGORITHMS
@BF16_MODES
def test_all_numbers_in_the_loops_in_c_have_32_bits(cls, options, rounding):
    """Compilers choose the width of vectors by the narrowest numbers, so bytes are converted in loops of their own."""
    _, *loops = render_block_loops(spec_of(cls, rounding, options)).split("#pragma GCC ivdep")
    assert len(loops) == 2
    for loop in loops:
        body = loop[: loop.index("\n            }\n")]
        assert "odd element" in body
        assert not re.search(r"byte_pair|int8_t|int16_t", body)
