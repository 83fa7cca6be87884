"""The `triton` backend: one launch per spec, 64-bit offsets, alignment, tables, what stays on the device."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from hf_lowprec import once
from hf_lowprec.optim import AdamW, StableAdamW
from hf_lowprec.optim.backends import selection
from hf_lowprec.optim.backends.triton import launch as triton_backend
from hf_lowprec.optim.backends.triton import square_sum as triton_square_sum
from hf_lowprec.optim.backends.triton import tables as triton_tables
from hf_lowprec.optim.backends.triton.availability import TritonError
from hf_lowprec.optim.step.fused_step import fused_step
from tests.support.optim.optimizer_contents import assert_equal, everything
from tests.support.triton_available import InPlaceOfAKernel, quiet_interpreter, require_triton

require_triton()
pytestmark = quiet_interpreter
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def make(shapes, dtype=BF16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.randn(param.shape, generator=generator).to(DEVICE, dtype)
    return made


@pytest.fixture
def launches(monkeypatch) -> Counter:
    """Counts launches of step kernels by grid."""
    counted: Counter = Counter()
    real = triton_backend.kernels

    class Counting(InPlaceOfAKernel):
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            counted[grid] += 1
            return self.kernel[grid]

    def kernels(spec):
        step, step_ragged, *sums = real(spec)
        return triton_backend.Kernels(Counting(step), Counting(step_ragged), *sums)

    monkeypatch.setattr(triton_backend, "kernels", kernels)
    return counted


@pytest.mark.parametrize(
    ("warp_size", "state_dtype", "limit"),
    [
        (32, BF16, {}),
        (32, torch.int8, {}),
        (64, BF16, {"waves_per_eu": 0}),
        (64, torch.int8, {"waves_per_eu": 4}),
    ],
    ids=["NVIDIA", "NVIDIA, 8 bits", "AMD", "AMD, 8 bits"],
)
def test_registers_are_limited_by_the_option_of_the_gpu(monkeypatch, warp_size, state_dtype, limit):
    options = {}

    class Recording(InPlaceOfAKernel):
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *tables, **keywords: options.update({self.name: keywords})

    kernels = triton_backend.Kernels(*map(Recording, triton_backend.Kernels._fields))
    monkeypatch.setattr(triton_backend, "kernels", lambda spec: kernels)
    monkeypatch.setattr(triton_backend, "_warp_size", lambda device: warp_size)
    StableAdamW(make([(9, 1024)]), rounding="kahan", state_dtype=state_dtype, backend="triton").step()

    shared = {"BLOCK": triton_backend.BLOCK, "num_warps": 128 // warp_size, "enable_fp_fusion": False}
    chunk, tail = {"CHUNK": triton_backend.CHUNK}, {"TAIL": triton_backend.TAIL}
    assert options["step_ragged"] == shared
    assert options["step"] == shared | chunk | limit
    assert options["tensor_sum"] == shared | chunk | tail


def test_many_tensors_are_one_launch_per_spec(launches):
    weights, norms = make([(k % 17,) for k in range(20)]), make([(5,)] * 3, FP32)
    reference = [nn.Parameter(p.detach().cpu()) for p in weights + norms]
    for param, source in zip(reference, weights + norms, strict=True):
        param.grad = source.grad.cpu()
    optimizer = AdamW(weights + norms, lr=0.1, backend="triton")
    optimizer.step()
    assert sum(launches.values()) == 2
    not_empty = sum(k % 17 > 0 for k in range(20))
    assert set(launches) == {(not_empty,), (3,)}  # one program per chunk, and each tensor here is one
    AdamW(reference, lr=0.1, backend="eager").step()
    for ours, theirs in zip(weights + norms, reference, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("fails", ["step", "step_ragged", "tensor_sum", "square_sum"])
def test_a_kernel_that_does_not_compile_leaves_everything_unchanged(fails, monkeypatch):
    """Whole chunks and ragged ones, a mean and a norm; `auto` goes on with `eager`, and says so once."""

    class DoesNotCompile:
        def warmup(self, *tables, **options):
            raise ValueError("out of resources: registers")

    real = triton_backend.kernels
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(selection, "expected_backend", lambda backend, device: "triton")
    if fails == "square_sum":
        monkeypatch.setattr(triton_square_sum, "square_sum", DoesNotCompile())
    else:
        broken = {fails: DoesNotCompile()}
        monkeypatch.setattr(triton_backend, "kernels", lambda spec: real(spec)._replace(**broken))

    def optimizer(backend):
        return StableAdamW(make([(37,), (8192,)]) + make([(5,)], FP32), max_grad_norm=1.0, backend=backend)

    requested, automatic, eager = map(optimizer, ("triton", "auto", "eager"))
    before = everything(requested)
    with pytest.raises(TritonError, match=r"cannot compile.*out of resources: registers.*'eager'"):
        requested.step()
    assert_equal(everything(requested)["params"], before["params"])
    assert all(not state["step"] for state in requested.state.values())
    with pytest.warns(RuntimeWarning, match="'eager' backend on .*out of resources") as warned:
        automatic.step()
    assert len(warned) == 1
    monkeypatch.undo()
    eager.step()
    assert_equal(everything(automatic), everything(eager))


@pytest.mark.parametrize(
    "start",
    [2**31, 2**40, *(pytest.param(n, marks=pytest.mark.every_case) for n in (2**31 - 8192, 2**32 - 8192, 2**33))],
)
def test_offsets_have_64_bits(start):
    """A chunk far into a tensor: the table points so far before the data that the chunk's elements are the data."""
    (param,) = make([(triton_backend.CHUNK + 100,)])
    optimizer = AdamW([param], lr=0.1, rounding="kahan", backend="triton")
    with optimizer.plan_step() as plan:
        (fused_group,) = plan.fused_groups
        fused_group.step_scalars.compute(optimizer.scalars)
        tensors = list(fused_group.entries[0].tensors.values())
        data = [tensor.clone() for tensor in tensors]
        end = start + param.numel()
        whole = torch.tensor([[0, start]], device=DEVICE)
        ragged = torch.tensor([[0, 0, start + triton_backend.CHUNK, end]], device=DEVICE)
        segments = fused_group.segments.table.clone()
        segments[0, 1:3] = torch.tensor([end, 5])  # the end, and what global indices are ahead
        addresses = [[tensor.data_ptr() - start * tensor.element_size() for tensor in tensors]]
        kernels = triton_backend.kernels(fused_group.spec)
        constants = {"BLOCK": triton_backend.BLOCK, "enable_fp_fusion": False}
        tables = [
            segments.to(DEVICE),
            torch.tensor(addresses, device=DEVICE),
            fused_group.scalars.to(DEVICE),
            fused_group.counts.to(DEVICE),
            torch.ones((), dtype=torch.int32, device=DEVICE),
        ]
        kernels.step[(1,)](whole, *tables, CHUNK=triton_backend.CHUNK, **constants)
        kernels.step_ragged[(1,)](ragged, *tables, **constants)
        index = ((torch.arange(param.numel()) + start + 5) & 0xFFFFFFFF).to(torch.int32)
        weight, grad, *states = (tensor.cpu().float() for tensor in data)
        named = dict(zip(list(fused_group.spec.tensors)[2:], states, strict=True))
        scalars = dict(zip(fused_group.spec.scalars, fused_group.scalars[0].tolist(), strict=True))
        new_weight, new_state = fused_step(
            fused_group.spec, weight, grad, named, scalars, index, fused_group.segment_keys()[0]
        )
        assert torch.equal(param.detach().cpu().float(), new_weight)
        for name, state in zip(list(fused_group.spec.tensors)[2:], tensors[2:], strict=True):
            assert torch.equal(state.cpu().float(), new_state[name]), name


def test_a_checkpoint_crosses_from_counts_on_the_device_to_the_host_and_back():
    trained, resumed = make([(40,)]), make([(40,)])
    first = AdamW(trained, lr=0.1, backend="triton", skip_nonfinite=True)
    first.step()
    second = AdamW(resumed, lr=0.1, backend="triton")
    resumed[0].data.copy_(trained[0].data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    third = AdamW(make([(40,)]), lr=0.1, backend="triton", skip_nonfinite=True)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    third.param_groups[0]["params"][0].data.copy_(trained[0].data)
    for optimizer in (first, second, third):
        optimizer.step()
    assert torch.equal(trained[0], resumed[0])
    assert torch.equal(trained[0], third.param_groups[0]["params"][0])


def test_static_tables_are_sent_once(monkeypatch):
    """Segments and chunks go to the device with the first step; pointers, scalars and counts with every step."""
    sent = []
    upload = triton_tables._upload
    monkeypatch.setattr(triton_tables, "_upload", lambda *tables: sent.append(len(tables) - 1) or upload(*tables))
    params = make([(40,), (7,)])
    optimizer = AdamW(params, backend="triton", max_grad_norm=1.0)
    for _ in range(3):
        optimizer.step()
        for param in params:
            param.grad = torch.ones_like(param)
    static, alignment, every_step = 3, 2, 3
    assert sent == [static, every_step, alignment, every_step, every_step]
