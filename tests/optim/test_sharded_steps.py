"""Four ranks on gloo: steps on shards of DTensors are the steps on the full tensors, bit for bit.

With states in 8 bits, all ranks refuse shards that cut blocks.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hf_lowprec
from hf_lowprec import fp32_state_dict
from hf_lowprec.monitor.step_precision import SUMS
from hf_lowprec.optim import Adafactor, AdamW, LowPrecisionOptimizer, Muon, ScheduleFreeAdamW, StableAdamW
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.sharding import shard_like
from hf_lowprec.optim.step import orthogonalization
from hf_lowprec.rounding.attached_low_bits import attach_low_bits, attached_low_bits
from tests.support.chosen_cases import EVERY_CASE, one_in_turn
from tests.support.optim.backward_pass import give_gradients
from tests.support.processes.ranks import on_ranks
from tests.support.processes.shards import has_shard_of, of_every_rank, shard
from tests.support.triton_available import require_triton

CASES = {
    "rows": ("line", [(10, 6), (4, 3), (2, 5), (1,), (7,), (0, 3), (1, 6)], [Shard(0)]),
    "columns": ("line", [(6, 10), (3, 2), (5, 1)], [Shard(1)]),
    "last of three": ("line", [(3, 4, 5), (2, 2, 9)], [Shard(2)]),
    "middle of three": ("line", [(3, 6, 5)], [Shard(1)]),
    "replicated": ("line", [(5, 3), ()], [Replicate()]),
    "rows and columns": ("square", [(5, 7), (2, 3), (1, 3)], [Shard(0), Shard(1)]),
    "rows twice": ("square", [(11, 3), (8, 2)], [Shard(0), Shard(0)]),
    "tensor parallel below data parallel": (
        "square",
        [(8, 3), (16, 2), (8, 3, 2)],
        [_StridedShard(0, split_factor=2), Shard(0)],
    ),
    "hybrid": ("square", [(9, 4), (3,)], [Replicate(), Shard(0)]),
    "columns, replicated": ("square", [(4, 9)], [Shard(1), Replicate()]),
}
IN_8_BITS = {
    "rows": ("line", [(10, 64), (2, 32), (4, 3, 32), (7, 5), (9,)], [Shard(0)]),
    "columns": ("line", [(4, 128), (1, 256)], [Shard(1)]),
    "middle of three": ("line", [(2, 4, 32), (3, 5, 64)], [Shard(1)]),
    "last of three": ("line", [(2, 3, 128), (1, 1, 256)], [Shard(2)]),
    "hybrid": ("square", [(9, 64), (3, 32), (5,)], [Replicate(), Shard(0)]),
    "rows and columns": ("square", [(5, 64), (1, 128)], [Shard(0), Shard(1)]),
    "rows twice": ("square", [(11, 32), (2, 3, 64)], [Shard(0), Shard(0)]),
    "tensor parallel": ("square", [(8, 32), (16, 64)], [_StridedShard(0, split_factor=2), Shard(0)]),
    "columns, replicated": ("square", [(3, 64), (5, 128)], [Shard(1), Replicate()]),
    "replicated": ("line", [(5, 64), (3, 7)], [Replicate()]),
}
"""Whole blocks on all ranks. Rows of other lengths and vectors have no states in 8 bits."""
CUT_BLOCKS = [
    ("line", (4, 64), [Shard(1)]),
    ("line", (4, 160), [Shard(1)]),
    ("line", (2, 2, 192), [Shard(2)]),
    ("square", (4, 96), [Shard(0), Shard(1)]),
    ("square", (4, 64), [Shard(1), Shard(1)]),
]
FOR_THE_INTERPRETER = ("rows", "columns", "tensor parallel below data parallel", "hybrid")
"""One of each kind of segments, since Triton's interpreter takes seconds for each."""
STEPS = 4 if EVERY_CASE else 3


def muon(params, **options) -> LowPrecisionOptimizer:
    """Matrices and, by AdamW, what is none."""
    return Muon(params, matrices=[p for p in params if p.ndim in (2, 3)], **options)


FACTORED = ({}, {"beta1": 0.9, "weight_decay": 0.1}, {"scale_parameter": False, "rounding": "split"})
"""Options of Adafactor, whose states, means over rows and columns, are read by every backend."""


def gradient(shape: tuple[int, ...], step: int, number: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + number)).bfloat16()


def weights(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """FP32 weights; in every second tensor, those of the first ranks are zero."""
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    if number % 2 and weights.ndim:
        weights[: len(weights) // 2] = 0
    return weights


class Pair:
    """Optimizers of full tensors, by `eager`, and of shards of them, which get the same gradients.

    With `low`, compensations and remainders start with the low bits of FP32 weights, where there are any.
    """

    def __init__(self, make, mesh: DeviceMesh, shapes, placements, backend: str, low: bool = False, **options) -> None:
        self.mesh, self.placements, self.case = mesh, placements, (make, placements, options)
        self.full, self.parts = torch.nn.ParameterList(), torch.nn.ParameterList()
        for k, shape in enumerate(shapes):
            self.full.append(weights(shape, k))
            hf_lowprec.cast_model(self.full, keep_low_bits=low)
            self.parts.append(torch.nn.Parameter(shard(self.full[k].detach().clone(), mesh, placements)))
            if (kept := attached_low_bits(self.full[k])) is not None:
                attach_low_bits(self.parts[k], shard_like(kept, self.parts[k]))
        self.makers = [
            partial(make, params, lr=0.1, backend=by, **options)
            for params, by in ((self.full, "eager"), (self.parts, backend))
        ]
        self.whole, self.sharded = (make() for make in self.makers)

    def load(self, with_whole: bool, **options) -> None:
        """Go on from a checkpoint with new optimizers; by default, only that of the shards is new."""
        for optimizer in (self.whole, self.sharded) if isinstance(self.whole, ScheduleFreeAdamW) else ():
            optimizer.eval()
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (self.whole, self.sharded)]
        if with_whole:
            self.whole = self.makers[0](**options)
            self.whole.load_state_dict(saved[0])
        self.sharded = self.makers[1](**options)
        self.sharded.load_state_dict(saved[1])
        for optimizer in (self.whole, self.sharded) if isinstance(self.whole, ScheduleFreeAdamW) else ():
            optimizer.train()

    def step(self, step: int) -> None:
        """Step both."""
        for k, param in enumerate(self.full):
            param.grad = gradient(param.shape, step, k)
        grads = [shard(param.grad, self.mesh, self.placements) for param in self.full]
        give_gradients(self.sharded, self.parts, grads)
        self.whole.step()
        self.sharded.step()

    def compare(self, *case: object) -> None:
        """Assert that weights, states and FP32 estimates of the two have the same bits."""
        estimates = fp32_state_dict(self.full, self.whole), fp32_state_dict(self.parts, self.sharded)
        for k, (param, part) in enumerate(zip(self.full, self.parts, strict=True)):
            where = (*case, *self.case, tuple(param.shape))
            assert torch.equal(part.full_tensor(), param), where
            assert has_shard_of(estimates[1][str(k)], estimates[0][str(k)]), where
            theirs, ours = self.whole.state[param], self.sharded.state[part]
            assert theirs.keys() == ours.keys(), where
            for key, value in theirs.items():
                same = torch.equal(ours[key], value) if key == "step" else has_shard_of(ours[key], value)
                assert same, (key, *where)


def check(name: str, make, mesh, shapes, placements, backend: str, then: dict | None = None, **options) -> None:
    """Train a pair and compare; from step 3 with the settings `then`."""
    pair = Pair(make, mesh, shapes, placements, backend, **options)
    for step in range(1, STEPS + 1):
        if step == 2:
            pair.load(with_whole=False)
        optimizers = pair.whole, pair.sharded
        for group in (group for each in optimizers for group in each.param_groups) if then and step == 3 else ():
            group |= then
        monitors = list(map(hf_lowprec.PrecisionMonitor, optimizers)) if step == 3 else []
        for monitor in monitors:
            monitor.measure_next_step()
        pair.step(step)
        if monitors:
            check_sums(monitors, name, options)
        for monitor in monitors:
            monitor.close()
        if pair.whole.grad_norm is not None:
            torch.testing.assert_close(pair.sharded.grad_norm, pair.whole.grad_norm, rtol=2**-20, atol=0)
    pair.compare(name)


def check_8_bits(make, mesh, shapes, placements, backend: str = "native", **options) -> None:
    """Train a pair with states in 8 bits and compare, also after loading with other dtypes."""
    pair = Pair(make, mesh, shapes, placements, backend, state_dtype=torch.int8, **options)
    for step in range(1, STEPS):
        pair.step(step)
    pair.compare()
    for param in pair.full:
        # Of Adafactor's states, the momentum and not the means.
        codes = param.shape[-1] % 32 == 0 and pair.whole.param_groups[0].get("beta1", True) is not None
        assert (torch.int8 in {state.dtype for state in pair.whole.state[param].values()}) == codes, param.shape
    if options.get("gradient_release"):
        return
    # Up to FP32 and, after a step, down to BF16 and to 8 bits again.
    between = (torch.float32, torch.bfloat16) if EVERY_CASE else ()
    for dtype in (*between, torch.float32, torch.int8):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "saved states were converted")
            pair.load(with_whole=True, state_dtype=dtype)
        pair.compare(dtype)
        pair.step(10)


def check_refusal(mesh: DeviceMesh, shape: tuple[int, ...], placements) -> None:
    """Every rank refuses states in 8 bits, before it has changed anything, and takes the way out."""
    part = torch.nn.Parameter(shard(gradient(shape, 0, 0), mesh, placements))
    part.grad = shard(gradient(shape, 0, 1), mesh, placements)
    before = part.to_local().clone()
    optimizer = AdamW([part], state_dtype=torch.int8)
    refusal = refusal_of(optimizer.step)
    assert len(set(of_every_rank(refusal))) == 1, refusal
    assert f"state_dtype=int8: a parameter of shape {shape}" in refusal, refusal
    assert "cuts blocks of 32" in refusal, refusal
    assert torch.equal(part.to_local(), before)
    in_bf16 = AdamW([part], state_dtype=torch.bfloat16)
    in_bf16.step()
    assert not torch.equal(part.full_tensor(), gradient(shape, 0, 0))
    assert refusal_of(lambda: optimizer.load_state_dict(in_bf16.state_dict())) == refusal
    assert not any(optimizer.state.values())


def refusal_of(call: Callable[[], None]) -> str:
    with pytest.raises(ValueError) as raised:
        call()
    return str(raised.value)


def check_sums(monitors: list[hf_lowprec.PrecisionMonitor], *case: object) -> None:
    """All elements of such small tensors are sampled, so that only the order of sums differs."""
    expected, found = (monitor.last.sums for monitor in monitors)
    torch.testing.assert_close(
        found, expected, rtol=1e-9, atol=1e-20, equal_nan=True, msg=lambda text: f"{case}, columns {SUMS}: {text}"
    )


def check_gradients_placed_otherwise(mesh, backend: str) -> None:
    """As tensor parallelism leaves them: replicated, or parts of a sum. They are moved before the norm and the step."""
    full = torch.nn.Parameter(weights((8, 6), 0).bfloat16())
    full.grad = gradient((8, 6), 1, 0)
    cases = [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Partial()), (Shard(0), Partial())]
    for placement, of_gradient in cases:
        part = torch.nn.Parameter(shard(full.detach().clone(), mesh, [placement]))
        if of_gradient.is_partial():  # the first rank has the sum, so that nothing is rounded
            first = full.grad * (dist.get_rank() == 0)
            part.grad = DTensor.from_local(first, mesh, [of_gradient])
        else:
            part.grad = shard(full.grad, mesh, [of_gradient])
        whole = torch.nn.Parameter(full.detach().clone())
        whole.grad = full.grad
        for param in (part, whole):
            optimizer = AdamW([param], lr=0.1, backend=backend, rounding="stochastic")
            norm = optimizer.clip_grad_norm_(1.0)
            torch.testing.assert_close(norm, full.grad.float().norm(), rtol=2**-20, atol=0)
            optimizer.step()
        assert has_shard_of(part, whole), (placement, of_gradient)


def check_monitor_of_torch(name: str, mesh, shapes, placements) -> None:
    """Measure torch's AdamW on full tensors and on shards of them: the numbers are the same."""
    full = [torch.nn.Parameter(weights(shape, k)) for k, shape in enumerate(shapes)]
    parts = [torch.nn.Parameter(shard(param.detach().clone(), mesh, placements)) for param in full]
    optimizers = [torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1) for params in (full, parts)]
    monitors = [hf_lowprec.PrecisionMonitor(optimizer, every=1) for optimizer in optimizers]
    for step in range(1, STEPS + 1):
        for k, (param, part) in enumerate(zip(full, parts, strict=True)):
            param.grad = gradient(param.shape, step, k).to(param.dtype)
            part.grad = shard(param.grad, mesh, placements)
        for optimizer in optimizers:
            optimizer.step()
        check_sums(monitors, name)


def checks_of_a_sharding(name: str, mesh, shapes, placements, backend: str) -> list[Callable[[], None]]:
    """Every check, of the AdamW of this package and of other optimizers."""

    def of(make, **options) -> Callable[[], None]:
        return partial(check, name, make, mesh, shapes, placements, backend, **options)

    checks = [of(AdamW, rounding=rounding) for rounding in ("kahan", "stochastic")]
    checks += [of(AdamW, rounding="split", gradient_release=True), of(AdamW, skip_nonfinite=True, **NO_LIMIT)]
    checks += [of(Adafactor, **NO_LIMIT, **options) for options in FACTORED]
    checks += [of(AdamW, rounding="stochastic", factored=True)]
    if backend == "triton":
        return checks
    # No backend does what the others look at: whole tensors, averages, low bits that are kept, changes of the mode.
    checks += [of(StableAdamW, **NO_LIMIT), of(muon, **NO_LIMIT)]
    checks += [of(ScheduleFreeAdamW, rounding=rounding) for rounding in ("split", "kahan", "stochastic")]
    checks += [of(AdamW, rounding=rounding, low=True) for rounding in ("kahan", "split")]
    checks += [of(AdamW, rounding="kahan", then={"rounding": mode}) for mode in ("stochastic", "split")]
    checks += [of(AdamW, rounding="split", then={"rounding": "kahan"})]
    checks += [of(AdamW, factored=factored, then={"factored": not factored}) for factored in (True, False)]
    if name != "tensor parallel below data parallel":  # which torch's AdamW cannot step
        checks += [partial(check_monitor_of_torch, name, mesh, shapes, placements)]
    return checks


NO_LIMIT = {"max_grad_norm": 1e6}
"""A limit that no gradient reaches: the factor is one, whatever the norm's last bits."""
MAKE_IN_8_BITS = [
    (AdamW, {"rounding": "kahan"}),
    (AdamW, {"rounding": "split", "gradient_release": True}),
    (AdamW, {"rounding": "stochastic", "skip_nonfinite": True, **NO_LIMIT}),
    *((make, {"backend": "eager"}) for make in (StableAdamW, muon)),  # of no backend's doing
    (Adafactor, {"beta1": 0.9}),
    (Adafactor, {"rounding": "stochastic", **NO_LIMIT}),
    (AdamW, {"rounding": "stochastic", "factored": True}),
]


def check_all(backend: str) -> None:
    """Check "eager", "native" or "triton", or states in "8 bits"."""
    dist.init_process_group("gloo")
    gradient_buckets.BUCKET_ELEMENTS = 1  # each parameter is stepped when the next one has its gradient
    orthogonalization.CHUNK = 32  # several parts of Muon's matrices, whose order must be the same on all ranks
    meshes = {"line": init_device_mesh("cpu", (4,)), "square": init_device_mesh("cpu", (2, 2))}
    cases = {"triton": {name: CASES[name] for name in FOR_THE_INTERPRETER}, "8 bits": IN_8_BITS}.get(backend, CASES)
    for number, (name, (kind, shapes, placements)) in enumerate(cases.items()):
        if backend == "8 bits":
            for make, options in one_in_turn(MAKE_IN_8_BITS, number):
                check_8_bits(make, meshes[kind], shapes, placements, **options)
            continue
        checks = checks_of_a_sharding(name, meshes[kind], shapes, placements, backend)
        for each in checks if EVERY_CASE else checks[number % 6 :: 6]:
            each()
    for kind, shape, placements in CUT_BLOCKS if backend == "8 bits" else ():
        check_refusal(meshes[kind], shape, placements)
    if backend == "native":
        check("matrices that are one batch", muon, meshes["line"], [(5, 3), (7,), (5, 3)], [Shard(0)], backend)
    if backend != "8 bits":
        check_gradients_placed_otherwise(meshes["line"], backend)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("steps", ["native", "8 bits", pytest.param("triton", marks=pytest.mark.every_case)])
def test_sharded_steps_are_the_steps_on_the_full_tensors(steps):
    if steps == "triton":
        require_triton()
        if torch.cuda.is_available():
            pytest.skip("gloo ranks hold CPU tensors; Triton's interpreter is for machines without a GPU")
    on_ranks(check_all, 4, steps)
