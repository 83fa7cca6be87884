"""Generated code on processors that are not here: PTX for NVIDIA GPUs, executed in NumPy, and C on emulated 64-bit ARM.

Kernels, tables and launches are the backends' own; only the processor is emulated. Steps have the bits of `eager`. On
ARM, arithmetic makes NaNs of other signs and payloads, compilers contract to fused multiply-adds unless told not to,
and integers of 8 bits have no sign unless they are declared with one. See docs/contributing/gpu.md.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, AdamW, Adan, Lion
from hf_lowprec.optim.backends.c import native
from hf_lowprec.optim.backends.c.block_loops import BlockLoop, block_loops, render_block_loops
from hf_lowprec.optim.backends.c.compiler import FLAGS
from hf_lowprec.optim.backends.trace import trace
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.rounding import MODES
from tests.support.chosen_cases import nightly_except
from tests.support.optim.emulated_arm import PROCESSORS, EmulatedLibrary, missing_programs
from tests.support.optim.emulated_gpu import CAPABILITIES, EmulatedGpu
from tests.support.optim.every_optimizer import NAMES, OPTIONS
from tests.support.optim.trained_everywhere import EVERY_MODE, same, trained
from tests.support.triton_available import require_triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLIPPED = (BF16, {"rounding": "kahan", "max_grad_norm": 1.0, "skip_nonfinite": True})
"""The third step is skipped, since some gradients are NaN."""
OF_WHOLE_TENSORS = ("Adafactor", "Prodigy", "StableAdamW")
EVERY_CASE = [*itertools.product(NAMES, EVERY_MODE), ("SGD", CLIPPED)]
FEW = [("AdamW", (BF16, {"rounding": "stochastic", "state_dtype": torch.int8})), ("SGD", CLIPPED)]
"""Those of the short suite, since a second per kernel is the compiler's."""
ON_ARM = [*itertools.product(["AdamW"], EVERY_MODE), ("StableAdamW", EVERY_MODE[0]), ("SGD", CLIPPED)]
"""Those of the short suite; in the nightly one, every other algorithm but Muon, whose matrix products are torch's."""
EVERY_CASE_ON_ARM = [
    *ON_ARM,
    *((name, mode) for name, mode in EVERY_CASE if mode in EVERY_MODE[:9:8] and name != "Muon"),
]


def cases(few: list, every: list) -> list:
    return [
        pytest.param(name, mode, id=f"{name}-{mode}", marks=() if (name, mode) in few else pytest.mark.every_case)
        for name, mode in every
    ]


def assert_bits_of_eager(stepped: list, name: str, dtype: torch.dtype, options: dict) -> None:
    assert same(stepped, trained(name, dtype, "eager", **options))
    assert stepped[4].isnan().any()
    assert not stepped[4].isnan().all()


@pytest.mark.combinations(1)
@pytest.mark.parametrize("capability", nightly_except({80, 90}, CAPABILITIES))
@pytest.mark.parametrize(("name", "mode"), cases(FEW, EVERY_CASE))
def test_a_step_of_nvidia_has_the_same_bits(name, mode, capability):
    require_triton()
    dtype, options = mode
    options = {**OPTIONS[name][0], **options}
    gpu = EmulatedGpu(capability)
    with gpu.steps():
        stepped = trained(name, dtype, "triton", **options)
    assert gpu.launches["step"] >= 3 or name == "Muon"  # its matrices
    assert gpu.launches["step_ragged"] >= 3
    assert (gpu.launches["tensor_sum"] > 0) == (name in OF_WHOLE_TENSORS)
    assert (gpu.launches["matrix_sum"] > 0) == (name == "Adafactor")
    assert (gpu.launches["square_sum"] > 0) == ("max_grad_norm" in options)
    assert_bits_of_eager(stepped, name, dtype, options)


@pytest.mark.parametrize("dtype", nightly_except({BF16}, [BF16, FP16, FP32]))
def test_the_sum_of_squares_of_nvidia(dtype):
    """Of a whole chunk, of the end of a tensor, of misaligned gradients, and of some that have to be scaled."""
    require_triton()
    generator = torch.Generator().manual_seed(2)
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (8192 + 1000, 1001, 500)]
    for param, scale, shift in zip(params, (1.0, 1e-3, 1e-30), (0, 1, 0), strict=True):
        values = torch.randn(param.numel() + shift, generator=generator, dtype=torch.float64) * scale
        param.grad = values.to(dtype)[shift:]
    gpu = EmulatedGpu(90)
    with gpu.steps(), AdamW(params, backend="triton").plan_step() as plan:
        (step,) = plan.backend_steps
        total = step.square_sum()
    expected = sum(param.grad.double().square().sum() for param in params)
    assert gpu.launches["square_sum"] == 1
    assert abs(total / expected - 1) <= 2 * 2.0**-41  # see `test_sums.py`


@pytest.mark.every_case
@pytest.mark.parametrize("state_dtype", [BF16, torch.int8])
def test_error_feedback_takes_few_instructions(state_dtype):
    """Six per element, of which a thread has eight; neither another division nor another root."""
    require_triton()
    counts = []
    for error_feedback in (None, False):
        gpu, param = EmulatedGpu(90), nn.Parameter(torch.ones(64, 64, dtype=BF16))
        param.grad = torch.ones_like(param)
        with gpu.steps():
            options = {"rounding": "stochastic", "state_dtype": state_dtype, "error_feedback": error_feedback}
            AdamW([param], backend="triton", **options).step()
        counts.append(gpu.instructions["step_ragged"])
    assert 0 < counts[0] - counts[1] <= 6 * 8


@contextlib.contextmanager
def emulated(folder: Path, processor: str, flags=FLAGS) -> Iterator[list[EmulatedLibrary]]:
    """Let optimizers that take their first step in this context use emulated libraries, which are listed here."""
    libraries: list[EmulatedLibrary] = []

    def kernel(spec):
        place = folder / str(len(libraries))
        place.mkdir()
        libraries.append(EmulatedLibrary(spec, place, PROCESSORS[processor], flags))
        return libraries[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "kernel", kernel)
        yield libraries


on_arm = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"{' and '.join(missing_programs())} not found: apt install gcc-aarch64-linux-gnu qemu-user",
)


@on_arm
@pytest.mark.combinations(1)  # a case takes a second to compile and emulate
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("name", "mode"), cases(ON_ARM, EVERY_CASE_ON_ARM))
def test_a_step_of_arm_has_the_same_bits(name, mode, processor, tmp_path):
    dtype, options = mode
    options = {**OPTIONS[name][0], **options}
    with emulated(tmp_path, processor) as libraries:
        stepped = trained(name, dtype, "native", **options)
    assert sum(library.calls["step"] for library in libraries) >= 3
    assert (sum(library.calls["tensor_sum"] for library in libraries) > 0) == (name in OF_WHOLE_TENSORS)
    assert (sum(library.calls["square_sum"] for library in libraries) > 0) == ("max_grad_norm" in options)
    assert_bits_of_eager(stepped, name, dtype, options)


@on_arm
def test_contracted_operations_would_be_seen(tmp_path):
    """A compiler for ARM contracts by default: without the flag, this test's first assertion fails."""
    contracting = [flag.replace("-ffp-contract=off", "-ffp-contract=fast") for flag in FLAGS]
    with emulated(tmp_path, "armv8-a", contracting):
        contracted = trained("AdamW", BF16, "native", rounding="kahan")
    assert not same(contracted, trained("AdamW", BF16, "eager", rounding="kahan"))


# The loops in C into which a step with states in 8 bits is divided.

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
