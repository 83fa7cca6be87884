"""The `triton` backend: launches, tables, 64-bit offsets, what does not compile; whole chunks and ragged ones.

Ragged are ends of tensors, and tensors on other than 16-byte boundaries.
"""

import copy

import pytest
import torch
from torch import nn

from hf_lowprec import once
from hf_lowprec.optim import AdamW, Muon, StableAdamW
from hf_lowprec.optim.backends import selection
from hf_lowprec.optim.backends.triton import handwritten_kernels
from hf_lowprec.optim.backends.triton import launch as triton_launch
from hf_lowprec.optim.backends.triton import tables as triton_tables
from hf_lowprec.optim.backends.triton.availability import TritonError
from hf_lowprec.optim.backends.triton.tables import BOUNDARY, DeviceTables, divide
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.optim.step.fused_step import fused_step
from tests.support.optim.optimizer_contents import assert_equal, everything
from tests.support.same_numbers import same_numbers
from tests.support.triton_available import InPlaceOfAKernel, quiet_interpreter, require_triton

require_triton()
pytestmark = quiet_interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP32 = torch.bfloat16, torch.float32
BLOCK, CHUNK = 128, 256
"""Of the tests, so that a tensor of a few hundred elements has several chunks; a warp's threads have one element."""
LENGTHS = [length + k for length in (0, BLOCK, CHUNK) for k in (-1, 0, 1, 8) if length + k >= 0]
LENGTHS += [BLOCK + 8, 2 * CHUNK, 2 * CHUNK + 1, 777]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for name, value in {"BLOCK": BLOCK, "CHUNK": CHUNK, "TAIL": BLOCK // 4}.items():
        monkeypatch.setattr(triton_launch, name, value)


class Launch:
    """A launch of a step kernel: which kernel, and its table of chunks."""

    def __init__(self, ragged: bool, table: torch.Tensor) -> None:
        self.ragged = ragged
        self.rows = table.tolist()


@pytest.fixture
def launches(monkeypatch) -> list[Launch]:
    """All launches of step kernels."""
    found: list[Launch] = []
    real = triton_launch.kernels

    class Recorded(InPlaceOfAKernel):
        def __init__(self, kernel, ragged: bool):
            self.kernel, self.ragged = kernel, ragged

        def __getitem__(self, grid):
            def launch(table, *arguments, **constants):
                assert grid == (len(table),)
                found.append(Launch(self.ragged, table))
                self.kernel[grid](table, *arguments, **constants)

            return launch

    def kernels(spec):
        step, ragged, *sums = real(spec)
        return triton_launch.Kernels(Recorded(step, False), Recorded(ragged, True), *sums)

    monkeypatch.setattr(triton_launch, "kernels", kernels)
    return found


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy on the device, `offset` elements after a boundary."""
    room = torch.empty(values.numel() + 16, dtype=values.dtype, device=DEVICE)
    assert room.data_ptr() % BOUNDARY == 0
    return room[offset : offset + values.numel()].view(values.shape).copy_(values)


def train(backend, lengths, steps=2, param_at=0, grad_at=0, states_at=0, dtype=BF16, cls=AdamW, **options):
    """The tensors of some parameters after a few steps. The offsets, in elements, are numbers or one per parameter."""
    generator = torch.Generator().manual_seed(1)

    def at(offset, k):
        return offset[k] if isinstance(offset, list) else offset

    def numbers(shape):
        return torch.randn(shape, generator=generator)

    shapes = [length if isinstance(length, tuple) else (length,) for length in lengths]
    params = [nn.Parameter(placed(numbers(shape).to(dtype), at(param_at, k))) for k, shape in enumerate(shapes)]
    if cls is Muon:
        options["matrices"] = params
    optimizer = cls(params, lr=0.1, backend=backend, **options)
    for step in range(steps):
        for k, param in enumerate(params):
            grad = numbers(param.shape) * 10.0 ** -(k % 5)
            param.grad = placed(grad.to(dtype), at(grad_at, k))
        optimizer.step()
        if step == 0:
            for k, param in enumerate(params):
                state = optimizer.state[param]
                for name in state:
                    if name != "step":
                        state[name] = placed(state[name], at(states_at, k))
    return [
        tensor.detach().cpu().clone()
        for param in params
        for tensor in (param, *(value for name, value in optimizer.state[param].items() if name != "step"))
    ]


def make(shapes, dtype=BF16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.randn(param.shape, generator=generator).to(DEVICE, dtype)
    return made


def assert_bits_of_eager(lengths, **options) -> None:
    """Steps of both backends give the same bits."""
    assert all(map(same_numbers, train("triton", lengths, **options), train("eager", lengths, **options)))


OFFSETS = [1, 4, 7, 8]
CASES = {
    # Where tensors begin. States are moved after the first step. Only those that begin alike have whole chunks between
    # head and end.
    "gradients": ([2 * CHUNK + 3 * k for k in OFFSETS], {"grad_at": OFFSETS}, [2]),
    "weights": ([2 * CHUNK + 3 * k for k in OFFSETS], {"param_at": OFFSETS}, [2]),
    "all alike": (
        [2 * CHUNK + 3 * k for k in OFFSETS], {"param_at": OFFSETS, "grad_at": OFFSETS, "states_at": OFFSETS}, [4 + 3]
    ),
    "each elsewhere": (
        [2 * CHUNK + 3 * k for k in OFFSETS], {"param_at": OFFSETS, "grad_at": OFFSETS[::-1], "states_at": 3}, []
    ),
    "every kind of length": (LENGTHS, {"rounding": "split"}, None),
    "FP32": ([5, BLOCK + 4, CHUNK + 2, 2 * CHUNK + 9], {"dtype": FP32, "grad_at": [0, 1, 2, 3]}, None),
    "FP16": ([5, BLOCK + 4, CHUNK + 2, 2 * CHUNK + 9], {"dtype": torch.float16, "grad_at": [0, 1, 2, 3]}, None),
    "8 bits": (
        [(1, 32), (5, 32), (3, 160), (CHUNK // 32, 32), (17, 32), (0, 32)],
        {"state_dtype": torch.int8, "grad_at": [1, 8, 0, 0, 4, 7], "param_at": [2, 0, 0, 1, 7, 0]},
        None,
    ),
    "empty, as of experts elsewhere": (
        [(0, 8), (3, 8), (0,), (2, 0, 4), (1,), (CHUNK,), (0, 0)], {"grad_at": [0, 1, 2, 3, 4, 0, 5]}, None
    ),
}  # fmt: skip
NIGHTLY = ("weights", "each elsewhere", "FP16")


@pytest.mark.parametrize(
    ("lengths", "options", "whole_chunks"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.every_case if name in NIGHTLY else ())
        for name, case in CASES.items()
    ],
)
def test_chunks_have_the_bits_of_eager(lengths, options, whole_chunks, launches):
    assert_bits_of_eager(lengths, **options)
    assert all(launch.rows for launch in launches)
    if whole_chunks is not None:
        assert [len(launch.rows) for launch in launches[-2:] if not launch.ragged] == whole_chunks


def test_parts_of_a_group(launches, monkeypatch):
    """Muon steps some entries of a group at a time: each part has its own chunks of both kinds."""
    monkeypatch.setattr("hf_lowprec.optim.step.orthogonalization.CHUNK", 1000)
    shapes = [(20, 20), (16, 16), (3, 5), (0, 4), (32, 32)]
    assert_bits_of_eager(shapes, cls=Muon, grad_at=[0, 0, 1, 0, 2], steps=1)
    entries = [sorted({row[0] for row in launch.rows}) for launch in launches if launch.ragged]
    assert entries == [[0], [1, 3]]  # the largest first
    assert [len(launch.rows) for launch in launches if not launch.ragged] == [2]


# Which table a chunk is in.


def step_of(lengths, **options):
    """The backend step of parameters with these lengths."""
    params = [nn.Parameter(torch.zeros(length, dtype=BF16, device=DEVICE)) for length in lengths]
    for param in params:
        param.grad = torch.zeros_like(param)
    with AdamW(params, backend="triton", **options).plan_step() as plan:
        (step,) = plan.backend_steps
        return step


def check_division(group, pointers) -> None:
    """Compare the chunks with the definition, element by element."""
    spec, segments = group.spec, group.segments
    whole, ragged = divide(spec, segments, pointers, CHUNK, BLOCK)
    sizes = [dtype.itemsize for dtype in spec.tensors.values()]
    placed_on = [k for k, name in enumerate(spec.tensors) if name not in spec.per_block_tensors]

    def is_aligned(segment: int, element: int) -> bool:
        entry = segments.entry_index[segment]
        return all((int(pointers[entry, k]) + element * sizes[k]) % BOUNDARY == 0 for k in placed_on)

    for segment, start in whole.tolist():
        assert is_aligned(segment, start)
    for entry, segment, start, end in ragged.tolist():
        assert entry == segments.entry_index[segment]
        assert 0 < end - start <= BLOCK
    for rows, columns in ((whole, (0, 1)), (ragged, (1, 2))):  # in order, so that entries are slices
        places = [tuple(row[k] for k in columns) for row in rows.tolist()]
        assert places == sorted(places)
    for segment in range(len(segments.first)):
        first, end = int(segments.first[segment]), int(segments.end[segment])
        parts = [(start, start + CHUNK, True) for of, start in whole.tolist() if of == segment]
        parts += [(start, stop, False) for _, of, start, stop in ragged.tolist() if of == segment]
        parts.sort()
        assert [first, *(stop for _, stop, _ in parts)] == [*(start for start, _, _ in parts), end]
        begin = next((k for k in range(first, min(first + 16, end)) if is_aligned(segment, k)), end)
        begin = first if spec.per_block_tensors and begin > first else begin
        expected = (end - begin) // CHUNK if is_aligned(segment, begin) and begin < end else 0
        assert sum(is_whole for *_, is_whole in parts) == expected


@pytest.mark.parametrize("options", [{}, {"state_dtype": FP32}, {"rounding": "split", "state_dtype": torch.int8}])
def test_every_element_is_in_one_chunk(options):
    lengths = [32 * k for k in (1, 2, 7, 8, 9, 16, 17, 40)] if options.get("state_dtype") == torch.int8 else LENGTHS
    shapes = [(length // 32, 32) for length in lengths] if options.get("state_dtype") == torch.int8 else lengths
    group = step_of(shapes, **options).fused_group
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([dtype.itemsize for dtype in group.spec.tensors.values()])
    shape = (len(lengths), len(sizes))
    for limit in (1, 2, 4, 16):  # more or less often alike
        pointers = torch.randint(0, limit, shape, generator=generator) * sizes
        pointers[::2] = torch.randint(0, limit, (len(lengths), 1), generator=generator)[::2] * sizes
        pointers[::3, 1] = 2 * torch.randint(0, limit, (len(lengths),), generator=generator)[::3]
        check_division(group, pointers + 2**46)


def test_segments_inside_of_a_tensor():
    """As of a tensor that is sharded by columns of odd length: every row is a segment, and all tensors begin alike."""
    group = step_of([5 * (CHUNK + 77)]).fused_group
    length = CHUNK + 77
    starts = torch.arange(0, 5 * length, length)
    group.segments.table = group.segments.table.repeat(5, 1)
    group.segments.first, group.segments.end = starts, starts + length
    group.segments.entry_index = torch.zeros(5, dtype=torch.int64)
    pointers = torch.zeros(1, len(group.spec.tensors), dtype=torch.int64)
    check_division(group, pointers)
    whole, _ = divide(group.spec, group.segments, pointers, CHUNK, BLOCK)
    assert len(whole) == 5


def test_a_launch_per_spec_and_kind_of_chunk(launches):
    train("triton", [CHUNK, 2 * CHUNK], steps=1)
    assert [launch.ragged for launch in launches] == [False]
    launches.clear()
    train("triton", [1, CHUNK - 1, 3], steps=1)
    assert [launch.ragged for launch in launches] == [True]
    launches.clear()
    params = make([(k % 17,) for k in range(20)]) + make([(5,)] * 3, FP32)
    AdamW(params, lr=0.1, backend="triton").step()
    assert sorted(len(launch.rows) for launch in launches) == [3, sum(k % 17 > 0 for k in range(20))]


def test_chunks_are_divided_again_only_if_the_alignment_has_changed(monkeypatch, launches):
    divided = []
    monkeypatch.setattr(triton_tables, "divide", lambda *arguments: divided.append(0) or divide(*arguments))
    param = nn.Parameter(torch.zeros(2 * CHUNK, dtype=BF16, device=DEVICE))
    optimizer = AdamW([param], backend="triton")
    held = []
    for offset in (0, 0, 1, 1, 1, 0, 0, 8):
        held.append(param.grad)  # so that no gradient has the memory of the one before
        param.grad = placed(torch.ones(2 * CHUNK, dtype=BF16), offset)
        optimizer.step()
    assert [launch.ragged for launch in launches] == [False, False, True, True, True, False, False, False]
    assert len(divided) == 3
    assert len({grad.data_ptr() for grad in held if grad is not None}) == len(held) - 1


@pytest.mark.combinations(1)
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("parts", ["all at once", "parts of matrices", "released buckets"])
def test_alignment_is_asked_once_per_step(parts, clipped, launches, monkeypatch):
    """Not once per launch, nor for the norm. A released bucket is a step of its own."""
    monkeypatch.setattr("hf_lowprec.optim.step.orthogonalization.CHUNK", CHUNK)
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", 2 * CHUNK)
    asked = []
    chunks = DeviceTables.chunks
    monkeypatch.setattr(DeviceTables, "chunks", lambda tables: asked.append(tables) or chunks(tables))
    params = [nn.Parameter(torch.zeros(2, CHUNK // 2, dtype=BF16, device=DEVICE)) for _ in range(3)]
    options = {"backend": "triton", "max_grad_norm": 1.0 if clipped else None}
    if parts == "parts of matrices":
        optimizer = Muon(params, matrices=params, **options)
    elif parts == "released buckets":
        optimizer = AdamW(params, gradient_release=True, clip="delayed" if clipped else "exact", **options)
    else:
        optimizer = AdamW(params, **options)
    for _ in range(3):
        asked.clear()
        launches.clear()
        optimizer.zero_grad()
        sum(param.sum() for param in params).backward()
        optimizer.step()
        assert len(launches) == (1 if parts == "all at once" else 3)
        assert len(asked) == (3 if parts == "released buckets" else 1)


def test_tables_that_are_released_within_a_step_are_made_anew(launches):
    """As before matrices are stepped, because addresses in them have changed."""
    step = step_of([CHUNK])
    group = step.fused_group
    group.step_scalars.compute(AdamW([nn.Parameter(torch.zeros(1))]).scalars)
    for offset in (0, 1):
        grad = placed(torch.ones(CHUNK, dtype=BF16), offset)
        group.set_gradients([grad], [grad.data_ptr()])
        step.run(range(1))
        step.release_tables()
    assert [launch.ragged for launch in launches] == [False, True]


# Kernels and tables.


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

    kernels = triton_launch.Kernels(*map(Recording, triton_launch.Kernels._fields))
    monkeypatch.setattr(triton_launch, "kernels", lambda spec: kernels)
    monkeypatch.setattr(triton_launch, "_warp_size", lambda device: warp_size)
    StableAdamW(make([(9, 1056)]), rounding="kahan", state_dtype=state_dtype, backend="triton").step()

    shared = {"BLOCK": triton_launch.BLOCK, "num_warps": 128 // warp_size, "enable_fp_fusion": False}
    chunk, tail = {"CHUNK": triton_launch.CHUNK}, {"TAIL": triton_launch.TAIL}
    assert options["step_ragged"] == shared
    assert options["step"] == shared | chunk | limit
    assert options["tensor_sum"] == shared | chunk | tail


@pytest.mark.parametrize("fails", ["step", "step_ragged", "tensor_sum", "square_sum"])
def test_a_kernel_that_does_not_compile_leaves_everything_unchanged(fails, monkeypatch):
    """Whole chunks and ragged ones, a mean and a norm; `auto` goes on with `eager`, and says so once."""

    class DoesNotCompile:
        def warmup(self, *tables, **options):
            raise ValueError("out of resources: registers")

    real = triton_launch.kernels
    monkeypatch.setattr(once, "_said", set())
    monkeypatch.setattr(selection, "expected_backend", lambda backend, device: "triton")
    if fails == "square_sum":
        monkeypatch.setattr(handwritten_kernels, "square_sum", DoesNotCompile())
    else:
        broken = {fails: DoesNotCompile()}
        monkeypatch.setattr(triton_launch, "kernels", lambda spec: real(spec)._replace(**broken))

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
    (param,) = make([(triton_launch.CHUNK + 100,)])
    optimizer = AdamW([param], lr=0.1, rounding="kahan", backend="triton")
    with optimizer.plan_step() as plan:
        (fused_group,) = plan.fused_groups
        fused_group.step_scalars.compute(optimizer.scalars)
        tensors = list(fused_group.entries[0].tensors.values())
        data = [tensor.clone() for tensor in tensors]
        end = start + param.numel()
        whole = torch.tensor([[0, start]], device=DEVICE)
        ragged = torch.tensor([[0, 0, start + triton_launch.CHUNK, end]], device=DEVICE)
        segments = fused_group.segments.table.clone()
        segments[0, 1:3] = torch.tensor([end, 5])  # the end, and what global indices are ahead
        addresses = [[tensor.data_ptr() - start * tensor.element_size() for tensor in tensors]]
        kernels = triton_launch.kernels(fused_group.spec)
        constants = {"BLOCK": triton_launch.BLOCK, "enable_fp_fusion": False}
        tables = [
            segments.to(DEVICE),
            torch.tensor(addresses, device=DEVICE),
            fused_group.scalars.to(DEVICE),
            fused_group.counts.to(DEVICE),
            torch.ones((), dtype=torch.int32, device=DEVICE),
        ]
        kernels.step[(1,)](whole, *tables, CHUNK=triton_launch.CHUNK, **constants)
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
