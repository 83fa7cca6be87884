"""What only a GPU can show of the fused step, and states on its host; bits of the step are compared in tests/optim."""

import gc

import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, AdamW, host_steps
from hf_lowprec.optim.backends.selection import expected_backend
from hf_lowprec.optim.backends.triton import launch as triton_backend
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.step.fused_step import fused_step
from hf_lowprec.rounding.low_bits import chunk_size
from tests.support.command_output import hf_lowprec
from tests.support.memory_use import memory_use

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16, FP32 = torch.bfloat16, torch.float32
MODES = [
    pytest.param({}, id="plain"),
    pytest.param({"max_grad_norm": 0.1}, id="clipped"),
    pytest.param({"skip_nonfinite": True}, id="skipping"),
    pytest.param({"max_grad_norm": 0.1, "skip_nonfinite": True}, id="all"),
]


def make(shapes, dtype=BF16, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [nn.Parameter(torch.randn(s, generator=generator, device="cuda").to(dtype)) for s in shapes]
    give_gradients(made, seed)
    return made


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device="cuda").to(param.dtype)


def model_like() -> list[nn.Parameter]:
    return make([(300, 64), (64,), (65, 3), (2 * triton_backend.CHUNK + 3,)]) + make([(64,)] * 5, FP32, seed=1)


def test_auto_is_triton():
    (param,) = make([(10,)])
    assert expected_backend("auto", param.device) == "triton"


@pytest.mark.parametrize("options", MODES)
def test_a_step_does_not_wait_for_the_device(options):
    params = model_like()
    optimizer = AdamW(params, **options)
    optimizer.step()
    give_gradients(params, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-4
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_learning_rate_on_the_device_is_not_asked_for():
    params = model_like()
    optimizer = AdamW(params, lr=torch.tensor(1e-3, device="cuda"), skip_nonfinite=True)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels(action) -> list[str]:
    """Names of the kernels that run in `action`."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        action()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    found = [e for e in profile.events() if e.device_type == cuda and not e.is_user_annotation]
    return [e.name for e in found if not e.name.startswith(("Mem", "mem"))]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([k % 97 + 1 for k in range(300)], ["step_ragged"]),
        ([(k % 3 + 1) * triton_backend.CHUNK for k in range(300)], ["step"]),
        ([triton_backend.CHUNK + k for k in range(300)], ["step_ragged", "step"]),
    ],
    ids=["ragged", "whole", "both"],
)
def test_at_most_two_kernels_for_a_spec_and_nothing_else(lengths, expected):
    params = make([(length,) for length in lengths])
    optimizer = AdamW(params)
    optimizer.step()
    assert kernels(optimizer.step) == expected


def test_nothing_is_compiled_again():
    triton_backend.kernels.cache_clear()  # other tests' kernels, which have other constants
    params = model_like()
    optimizer = AdamW(params, max_grad_norm=1.0)
    optimizer.step()
    functions = [
        kernel
        for backend_step in optimizer._plan.backend_steps
        for kernel in (backend_step.step_kernel, backend_step.ragged_kernel)
    ]

    def built() -> int:
        return sum(len(function.device_caches[torch.cuda.current_device()][0]) for function in functions)

    before = built()
    assert before == 4  # two for each spec, though the FP32 tensors have no whole chunk
    for step in range(20):
        optimizer.param_groups[0]["lr"] = 10.0**-step
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        optimizer.max_grad_norm = 1.0 + step
        give_gradients(params, step)
        optimizer.step()
    assert built() == before


@pytest.mark.parametrize(("rounding", "per_parameter"), [("kahan", 6), ("split", 6), ("stochastic", 4), ("nearest", 4)])
def test_memory_is_what_the_accounting_says(rounding, per_parameter):
    """Nothing is kept but the states, and a step needs no more than its tables beside them."""
    gc.collect()
    module = nn.Linear(4096, 8192, bias=False, device="cuda", dtype=BF16)
    module.weight.grad = torch.randn_like(module.weight)
    optimizer = AdamW(module.parameters(), rounding=rounding)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    states = torch.cuda.memory_allocated() - before
    chunks = module.weight.numel() // triton_backend.CHUNK
    tables = 16 * chunks + (1 << 14)  # chunk table, and the rest in blocks of the allocator
    assert 0 <= states - per_parameter * module.weight.numel() <= tables
    counted = sum(memory_use(module, optimizer).state.values())
    assert counted == per_parameter * module.weight.numel() + 8  # and the step count, int64 on the host
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - states <= tables


def test_a_tensor_of_more_than_2_to_the_31_elements():
    size = 2**31 + triton_backend.CHUNK + 77
    needed = 2 * 2 * size + 2**30  # a BF16 weight and its gradient, and a part in FP32
    if (free := torch.cuda.mem_get_info()[0]) < needed:
        pytest.skip(f"needs {needed / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free")
    param = nn.Parameter(torch.empty(size, dtype=BF16, device="cuda"))
    param.grad = torch.empty_like(param)
    parts = [slice(k, k + 5000) for k in (0, 2**31 - 2500, size - 5000)]
    for tensor in (param.data, param.grad):
        for part in tensor.split(1 << 28):
            part.normal_()
    optimizer = SGD([param], lr=0.1, rounding="stochastic", weight_decay=0.1)
    before = [(param.detach()[part].cpu().float(), param.grad[part].cpu().float()) for part in parts]
    with optimizer.plan_step() as plan:
        (fused_group,) = plan.fused_groups
        fused_group.step_scalars.compute(optimizer.scalars)
        (keys,) = fused_group.segment_keys()
        scalars = dict(zip(fused_group.spec.scalars, fused_group.scalars[0].tolist(), strict=True))
    optimizer.step()
    for part, (weight, grad) in zip(parts, before, strict=True):
        index = torch.arange(part.start, part.stop).to(torch.int32)
        new_weight, _ = fused_step(fused_group.spec, weight, grad, {}, scalars, index, keys)
        assert torch.equal(param.detach()[part].cpu().float(), new_weight), part


# States on the host.


def trained(**options) -> tuple[list, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to("cuda", torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(5):
        inputs = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [value for param in model.parameters() for value in optimizer.state[param].values()]
    return [*model.parameters(), *states], optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "split"},
        {"rounding": "stochastic", "state_dtype": torch.int8},
        {"rounding": "kahan", "gradient_release": True},
        {"rounding": "split", "gradient_release": True, "clip": "delayed", "max_grad_norm": 1.0},
        {"rounding": "split", "skip_nonfinite": True},
        {"rounding": "split", "offload_gradients": True},
        {"rounding": "stochastic", "offload_gradients": True, "skip_nonfinite": True},
    ],
    ids=str,
)
def test_it_is_the_ordinary_step(monkeypatch, options):
    """Without a clip factor, whose norm the two sum in other orders, or with that of the same sum."""
    monkeypatch.setattr(host_steps, "BUCKET_ELEMENTS", 1 << 19)
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1 << 19)
    on_gpu = {key: value for key, value in options.items() if key != "offload_gradients"}
    expected, _ = trained(backend="eager", **on_gpu)
    found, optimizer = trained(offload_states=True, **options)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(expected, found, strict=True))
    on_gpu = {n for state in optimizer.state.values() for n, value in state.items() if value.device.type != "cpu"}
    assert on_gpu == ({"step"} if "skip_nonfinite" in options else set())  # the GPU decides whether a step counts


def test_the_gpu_keeps_weights_and_one_bucket_of_gradients(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 1 << 22)
    before = torch.cuda.memory_allocated()
    params = [nn.Parameter(torch.zeros(1 << 22, device="cuda", dtype=torch.bfloat16)) for _ in range(16)]
    optimizer = AdamW(params, rounding="split", max_grad_norm=1.0, offload_states=True, offload_gradients=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        sum((param * 2).sum() for param in params).backward()
        optimizer.step()
    torch.cuda.synchronize()
    # Weights; gradients of which three are being copied, one waits and one is computed; and temporaries.
    assert torch.cuda.max_memory_allocated() - before <= (16 + 8) * 2 * params[0].numel()


def test_the_gpu_keeps_weights_and_gradients_alone():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    param = nn.Parameter(torch.zeros(1 << 25, device="cuda", dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    AdamW([param], rounding="split", offload_states=True).step()
    torch.cuda.synchronize()
    # Low bits to start with are computed in chunks. Their temporaries take 35 bytes per element on an H100.
    temporaries = 40 * chunk_size(param.device)
    assert torch.cuda.max_memory_allocated() - before <= 1.03 * 4 * param.numel() + temporaries
    assert temporaries < 64 << 20


def test_every_check_of_the_gpu_passes():
    result = hf_lowprec("doctor")
    # A library that computes layers wrong on this machine's CPU says nothing about the GPU.
    failed = [line for line in result.output.splitlines() if "FAILED" in line and "layers     cpu:" not in line]
    assert not failed, result.output
    assert "cuda:0: backend 'triton' gives the same bits as 'eager'" in result.output
    assert "12 steps on cuda:0" in result.output
    assert torch.cuda.get_device_name(0) in result.output
