"""Steps with states in 8 bits on shards of DTensors: codes and scales are the full tensors', or all ranks refuse.

sharded_8_bit_states.py
"""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_lowprec.optim import Adafactor, AdamW, LowPrecisionOptimizer, Muon, StableAdamW
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from tests.support.chosen_cases import EVERY_CASE, one_in_turn
from tests.support.optim.backward_pass import give_gradients
from tests.support.processes.shards import has_shard_of, shard
from tests.support.processes.worlds import run_worlds

# By number of ranks: the mesh, shapes and placements. Rows of other lengths and vectors have no states in 8 bits.
AGREE = {
    3: [
        ((3,), [(10, 64), (2, 32), (4, 3, 32), (7, 5), (9,)], [Shard(0)]),
        ((3,), [(4, 96), (1, 192)], [Shard(1)]),
        ((3,), [(2, 4, 32), (3, 5, 64)], [Shard(1)]),
        ((3,), [(2, 3, 96), (1, 1, 192)], [Shard(2)]),
    ],
    4: [
        ((2, 2), [(9, 64), (3, 32), (5,)], [Replicate(), Shard(0)]),
        ((2, 2), [(5, 64), (1, 128)], [Shard(0), Shard(1)]),
        ((2, 2), [(11, 32), (2, 3, 64)], [Shard(0), Shard(0)]),
        ((2, 2), [(8, 32), (16, 64)], [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2), [(3, 64), (5, 128)], [Shard(1), Replicate()]),
        ((4,), [(5, 64), (3, 7)], [Replicate()]),
    ],
}
CUT_BLOCKS = {
    3: [((3,), (4, 64), [Shard(1)]), ((3,), (4, 160), [Shard(1)]), ((3,), (2, 2, 128), [Shard(2)])],
    4: [((2, 2), (4, 96), [Shard(0), Shard(1)]), ((2, 2), (4, 64), [Shard(1), Shard(1)])],
}

gradient_buckets.BUCKET_ELEMENTS = 1  # each parameter is stepped when the next one has its gradient


def muon(params: list[torch.nn.Parameter], **options) -> LowPrecisionOptimizer:
    return Muon(params, matrices=[param for param in params if param.ndim == 2], **options)


# A limit that no gradient reaches: the factor is one, whatever the norm's last bits.
MAKE = [
    (AdamW, {"rounding": "kahan"}),
    (AdamW, {"rounding": "split", "gradient_release": True}),
    (AdamW, {"rounding": "stochastic", "max_grad_norm": 1e6, "skip_nonfinite": True}),
]
MAKE += [(StableAdamW, {"backend": "eager"}), (muon, {"backend": "eager"})]  # of no backend's doing
MAKE += [(Adafactor, {"beta1": 0.9}), (Adafactor, {"rounding": "stochastic", "max_grad_norm": 1e6})]


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check_agreement(
    make, mesh: DeviceMesh, shapes: list, placements: list[Placement], backend: str = "native", **options
) -> None:
    """Train full tensors with `eager`, and shards of them, on the same gradients."""
    full = [torch.nn.Parameter(random(shape, k)) for k, shape in enumerate(shapes)]
    parts = [torch.nn.Parameter(shard(param.detach().clone(), mesh, placements)) for param in full]
    whole = make(full, lr=0.1, state_dtype=torch.int8, backend="eager", **options)
    sharded = make(parts, lr=0.1, state_dtype=torch.int8, backend=backend, **options)
    for step in range(1, 4 if EVERY_CASE else 3):
        for k, param in enumerate(full):
            param.grad = random(param.shape, 100 * step + k)
        grads = [shard(param.grad, mesh, placements) for param in full]
        give_gradients(sharded, parts, grads)
        whole.step()
        sharded.step()
    compare(whole, sharded, full, parts, (make, options, placements))
    if options.get("gradient_release"):
        return
    # Saved and loaded with another state_dtype, up to FP32 and, after a step, down to BF16 and to 8 bits again.
    for dtype in (
        (torch.float32, torch.bfloat16, torch.float32, torch.int8) if EVERY_CASE else (torch.float32, torch.int8)
    ):
        saved = [optimizer.state_dict() for optimizer in (whole, sharded)]
        whole = make(full, lr=0.1, state_dtype=dtype, backend="eager", **options)
        sharded = make(parts, lr=0.1, state_dtype=dtype, backend=backend, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "saved states were converted")
            whole.load_state_dict(saved[0])
            sharded.load_state_dict(saved[1])
        compare(whole, sharded, full, parts, (make, options, placements, dtype))
        for k, (param, part) in enumerate(zip(full, parts, strict=True)):
            param.grad = random(param.shape, 1000 + k)
            part.grad = shard(param.grad, mesh, placements)
        whole.step()
        sharded.step()


def compare(whole: LowPrecisionOptimizer, sharded: LowPrecisionOptimizer, full: list, parts: list, case: tuple) -> None:
    """Assert that weights and states of the two optimizers have the same bits."""
    has_codes = torch.int8 in (group["state_dtype"] for group in whole.param_groups)
    has_codes &= whole.param_groups[0].get("beta1", True) is not None  # Adafactor's momentum, not its means
    for param, part in zip(full, parts, strict=True):
        case = (*case, tuple(param.shape))
        assert torch.equal(part.full_tensor(), param), case
        expected, found = whole.state[param], sharded.state[part]
        assert expected.keys() == found.keys(), case
        codes = has_codes and param.shape[-1] % 32 == 0
        assert (torch.int8 in {state.dtype for state in expected.values()}) == codes, case
        for name in expected.keys() - {"step"}:
            assert has_shard_of(found[name], expected[name]), (name, *case)


def check_refusal(mesh: DeviceMesh, shape: tuple[int, ...], placements: list[Placement]) -> None:
    """Every rank refuses, before it has changed anything, and takes the way out that the message names."""
    part = torch.nn.Parameter(shard(random(shape, 0), mesh, placements))
    part.grad = shard(random(shape, 1), mesh, placements)
    before = part.to_local().clone()
    optimizer = AdamW([part], state_dtype=torch.int8)
    refusal = ""
    try:
        optimizer.step()
    except ValueError as error:
        refusal = str(error)
    refusals = [""] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    assert len(set(refusals)) == 1, refusals
    assert f"state_dtype=int8: a parameter of shape {shape}" in refusal, refusal
    assert "cuts blocks of 32" in refusal, refusal
    assert torch.equal(part.to_local(), before)
    in_bf16 = AdamW([part], state_dtype=torch.bfloat16)
    in_bf16.step()
    assert not torch.equal(part.full_tensor(), random(shape, 0))
    try:
        optimizer.load_state_dict(in_bf16.state_dict())
    except ValueError as error:
        assert str(error) == refusal
        assert not any(optimizer.state.values())
    else:
        raise AssertionError("states whose blocks are cut were converted")


def check() -> None:
    """All cases for this number of ranks."""
    ranks = dist.get_world_size()
    for number, (sizes, shapes, placements) in enumerate(AGREE[ranks], ranks):
        mesh = init_device_mesh("cpu", sizes)
        for make, options in one_in_turn(MAKE, number):
            check_agreement(make, mesh, shapes, placements, **options)
    for sizes, shape, placements in CUT_BLOCKS[ranks]:
        check_refusal(init_device_mesh("cpu", sizes), shape, placements)
    if dist.get_rank() == 0:
        print(
            f"{len(AGREE[ranks])} shardings over {ranks} ranks agree, {len(CUT_BLOCKS[ranks])} are refused", flush=True
        )


if __name__ == "__main__":
    run_worlds(check, AGREE)
