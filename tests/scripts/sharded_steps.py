"""Four ranks on gloo: steps on shards of DTensors are the steps on the full tensors, bit for bit.

torchrun --nproc-per-node 4 sharded_steps.py eager|native|triton
"""

import copy
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hf_lowprec
from hf_lowprec import fp32_state_dict
from hf_lowprec.monitor.step_precision import SUMS
from hf_lowprec.optim import Adafactor, AdamW, LowPrecisionOptimizer, Muon, ScheduleFreeAdamW, StableAdamW
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.sharding import shard_like
from hf_lowprec.optim.step import whole_tensor_quantities
from hf_lowprec.rounding.attached_low_bits import attach_low_bits, attached_low_bits
from tests.support.chosen_cases import EVERY_CASE
from tests.support.optim.backward_pass import give_gradients
from tests.support.processes.ranks import leave
from tests.support.processes.shards import has_shard_of, shard

CASES = {
    "rows": ("line", [(10, 6), (4, 3), (2, 5), (1,), (7,), (0, 3), (1, 6)], [Shard(0)]),
    "columns": ("line", [(6, 10), (3, 2), (5, 1)], [Shard(1)]),
    "last of three": ("line", [(3, 4, 5), (2, 2, 9)], [Shard(2)]),
    "middle of three": ("line", [(3, 6, 5)], [Shard(1)]),
    "replicated": ("line", [(5, 3), ()], [Replicate()]),
    "rows and columns": ("square", [(5, 7), (2, 3), (1, 3)], [Shard(0), Shard(1)]),
    "rows twice": ("square", [(11, 3), (8, 2)], [Shard(0), Shard(0)]),
    "tensor parallel below data parallel": ("square", [(8, 3), (16, 2)], [_StridedShard(0, split_factor=2), Shard(0)]),
    "hybrid": ("square", [(9, 4), (3,)], [Replicate(), Shard(0)]),
    "columns, replicated": ("square", [(4, 9)], [Shard(1), Replicate()]),
}
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


def check(
    name: str, make, mesh, shapes, placements, backend: str, then: str | None = None, low: bool = False, **options
) -> None:
    """Train full tensors and shards of them on the same gradients and compare; from step 3 in the mode `then`.

    With `low`, compensations and remainders start with the low bits of FP32 weights, where there are any.
    """
    full, parts = torch.nn.ParameterList(), torch.nn.ParameterList()
    for k, shape in enumerate(shapes):
        full.append(weights(shape, k))
        hf_lowprec.cast_model(full, keep_low_bits=low)
        parts.append(torch.nn.Parameter(shard(full[k].detach().clone(), mesh, placements)))
        if (kept := attached_low_bits(full[k])) is not None:
            attach_low_bits(parts[k], shard_like(kept, parts[k]))
    whole = make(full, lr=0.1, backend="eager", **options)
    sharded = make(parts, lr=0.1, backend=backend, **options)
    for step in range(1, STEPS + 1):
        if step == 2:  # on from a checkpoint
            for optimizer in (whole, sharded) if make is ScheduleFreeAdamW else ():
                optimizer.eval()
            state = copy.deepcopy(sharded.state_dict())
            sharded = make(parts, lr=0.1, backend=backend, **options)
            sharded.load_state_dict(state)
            for optimizer in (whole, sharded) if make is ScheduleFreeAdamW else ():
                optimizer.train()
        for group in (*whole.param_groups, *sharded.param_groups) if then and step == 3 else ():
            group["rounding"] = then
        monitors = [hf_lowprec.PrecisionMonitor(optimizer) for optimizer in (whole, sharded)] if step == 3 else []
        for monitor in monitors:
            monitor.measure_next_step()
        for k, param in enumerate(full):
            param.grad = gradient(param.shape, step, k)
        grads = [shard(param.grad, mesh, placements) for param in full]
        give_gradients(sharded, parts, grads)
        whole.step()
        sharded.step()
        if monitors:
            check_sums(monitors, name, options)
        for monitor in monitors:
            monitor.close()
        if whole.grad_norm is not None:
            torch.testing.assert_close(sharded.grad_norm, whole.grad_norm, rtol=2**-20, atol=0)
    estimates, of_parts = fp32_state_dict(full, whole), fp32_state_dict(parts, sharded)
    for k, (param, part) in enumerate(zip(full, parts, strict=True)):
        assert torch.equal(part.full_tensor(), param), (name, options, k)
        assert has_shard_of(of_parts[str(k)], estimates[str(k)]), (name, options, k)
        for key, value in whole.state[param].items():
            mine = sharded.state[part][key]
            assert torch.equal(mine, value) if key == "step" else has_shard_of(mine, value), (name, options, k, key)


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

    # A limit that no gradient reaches: the factor is one, whatever the norm's last bits.
    never = {"max_grad_norm": 1e6}
    checks = [of(AdamW, rounding=rounding) for rounding in ("kahan", "stochastic")]
    checks += [of(AdamW, rounding="split", gradient_release=True), of(AdamW, skip_nonfinite=True, **never)]
    checks += [of(Adafactor, **never, **options) for options in FACTORED]
    if backend == "triton":
        return checks
    # No backend does what the others look at: whole tensors, averages, low bits that are kept, changes of the mode.
    checks += [of(StableAdamW, **never), of(muon, **never)]
    checks += [of(ScheduleFreeAdamW, rounding=rounding) for rounding in ("split", "kahan", "stochastic")]
    checks += [of(AdamW, rounding=rounding, low=True) for rounding in ("kahan", "split")]
    checks += [of(AdamW, rounding="kahan", then=then) for then in ("stochastic", "split")]
    checks += [of(AdamW, rounding="split", then="kahan")]
    if name != "tensor parallel below data parallel":  # which torch's AdamW cannot step
        checks += [partial(check_monitor_of_torch, name, mesh, shapes, placements)]
    return checks


def main(backend: str) -> None:
    dist.init_process_group("gloo")
    gradient_buckets.BUCKET_ELEMENTS = 1  # each parameter is stepped when the next one has its gradient
    whole_tensor_quantities.CHUNK = 30  # several parts of Muon's matrices, whose order must be the same on all ranks
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    cases = CASES if backend != "triton" else {name: CASES[name] for name in FOR_THE_INTERPRETER}
    for number, (name, (kind, shapes, placements)) in enumerate(cases.items()):
        mesh = {"line": line, "square": square}[kind]
        checks = checks_of_a_sharding(name, mesh, shapes, placements, backend)
        for each in checks if EVERY_CASE else checks[number % 6 :: 6]:
            each()
    if backend == "native":
        check("matrices that are one batch", muon, line, [(5, 3), (7,), (5, 3)], [Shard(0)], backend)
    check_gradients_placed_otherwise(line, backend)
    if dist.get_rank() == 0:
        print(f"{len(cases)} shardings agree", flush=True)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
