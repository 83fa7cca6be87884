"""Memory of tensors: some whose memory is not their values, or freed; and states, which lie apart on a CPU.

Those that are freed are tried in a process of its own, which a mistake would end.
"""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

from hf_lowprec import PrecisionMonitor
from hf_lowprec.optim import AdamW
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.optim.state.states import PAGE, SMALLEST, zeros_apart
from hf_lowprec.optim.step import param_entry
from hf_lowprec.rounding.modes import StoredState
from tests.support.optim.simulated_copies import simulate_device
from tests.support.processes import forkserver
from tests.support.triton_available import quiet_interpreter

pytestmark = quiet_interpreter


class Wrapper(Tensor):
    """A tensor that holds another one, and has no memory itself, as those of torchao have none."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


KINDS = {
    "negated": lambda values: torch._neg_view(-values),
    "negated, strided": lambda values: torch._neg_view(-values.repeat_interleave(2, 0))[::2],
    "zeros without memory": lambda values: torch._efficientzerotensor(
        values.shape, dtype=values.dtype, device=values.device
    ),
    "wrapped": Wrapper,
}
SIZES = [(3000,), (1,), (40, 50)]


def trained(kind, plain, **options) -> list:
    """Weights, states, norms and measurements of three steps; the second gradient and the first step's are plain."""
    random = torch.Generator().manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(size, generator=random).bfloat16()) for size in SIZES)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **options)
    monitor = PrecisionMonitor(optimizer, model, every=1)
    found = []
    for step in range(3):
        for number, param in enumerate(model):
            values = torch.randn(param.shape, generator=random).bfloat16()
            if number == 1 or step == 0:
                param.grad = values
            else:
                param.grad = KINDS[kind](values)
                param.grad = param.grad.clone().contiguous() if plain else param.grad
        found.append(optimizer.global_grad_norm())
        optimizer.step()
        found.append(torch.tensor(monitor.last.by_kind["all"]["lost_updates"]))
    return [*found, *model, *(state for param in model for state in optimizer.state[param].values())]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5, "rounding": "stochastic"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_whose_memory_is_not_their_values(kind, options, backend):
    found, expected = (trained(kind, plain, backend=backend, **options) for plain in (False, True))
    assert all(map(torch.equal, found, expected))


def loss_of_a_sign(param: Tensor) -> Tensor:
    return (param.square() + torch.sgn(param)).sum()


def loss_of_signs_alone(param: Tensor) -> Tensor:
    return torch.sgn(param).sum()


def loss_of_a_conjugate(param: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(param), param).conj().imag.add(3.0).square().sum()


@pytest.mark.parametrize(
    "options", [{}, {"gradient_release": True}, {"offload_states": True, "offload_gradients": True}], ids=str
)
@pytest.mark.parametrize("loss", [loss_of_a_sign, loss_of_signs_alone, loss_of_a_conjugate])
def test_gradients_of_autograd(loss, options, monkeypatch):
    if options.get("offload_states"):
        simulate_device(monkeypatch)
    params = [nn.Parameter(torch.tensor([0.5, -1.0, 240.0])) for _ in range(2)]
    ours = AdamW(params[:1], lr=0.1, state_dtype=torch.float32, **options)
    torchs = torch.optim.AdamW(params[1:], lr=0.1)
    for _ in range(20):
        for param, optimizer in zip(params, (ours, torchs), strict=True):
            loss(param).backward()
            if optimizer is torchs:  # which does not take a tensor of zeros without memory
                param.grad = param.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    # Two orders of five FP32 operations, in each of 20 steps that change a weight by 0.1.
    torch.testing.assert_close(*params, rtol=0, atol=20 * 5 * 240 * 2.0**-24)


def test_parameters_and_states_whose_memory_is_not_their_values(backend):
    found = []
    for negated in (True, False):
        random = torch.Generator().manual_seed(0)
        values = torch.randn(100, generator=random)
        params = [nn.Parameter(torch._neg_view(-values) if negated else values), nn.Parameter(torch.ones(3))]
        optimizer = AdamW(params, lr=0.1, backend=backend)
        for step in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=random)
            if step == 1 and negated:
                state = optimizer.state[params[1]]
                state["exp_avg"] = torch._neg_view(-state["exp_avg"])
            optimizer.step()
        found.append([*params, *(state for param in params for state in optimizer.state[param].values())])
    assert found[0][0].is_neg()
    assert all(map(torch.equal, *found))


def test_two_parameters_on_one_memory_are_refused(backend):
    for first, second in ((0, 10), (0, 10)), ((0, 6), (4, 10)), ((2, 10), (0, 3)):
        memory = torch.ones(10)
        params = [nn.Parameter(torch.ones(3)), *(nn.Parameter(memory[slice(*part)]) for part in (first, second))]
        optimizer = AdamW(params, backend=backend)
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises(ValueError, match=r"parameters (1 and 2|2 and 1) are two objects that share memory"):
            optimizer.step()
        assert torch.equal(memory, torch.ones(10)) and not optimizer.state
        params[2].grad = None
        optimizer.step()
    parts = [nn.Parameter(part) for part in torch.ones(10).split(5)]  # of one memory, but apart
    for param in parts:
        param.grad = torch.ones_like(param)
    AdamW(parts, backend=backend).step()


# Freed memory.

SCRIPT = """
import itertools
import torch
from torch import nn
from hf_lowprec.optim import AdamW

VICTIMS = ("the parameter itself", "its gradient", "its gradient, in a bucket", "exp_avg", "remainder")
cases = itertools.product(("eager", "native"), VICTIMS, (0, 2), ({}, {"max_grad_norm": 1.0}))
for backend, victim, steps, options in cases:
    named = [(name, nn.Parameter(torch.ones(40).bfloat16())) for name in ("a.weight", "b.weight", "c.weight")]
    optimizer = AdamW([{"params": named[:1]}, {"params": named[1:]}], backend=backend, **options)
    params = [param for _, param in named]
    bucket = torch.ones(600).bfloat16()
    for k in range(steps + 1):
        for number, param in enumerate(params):
            param.grad = bucket[200 * number :][:40] if "bucket" in victim else torch.ones(40).bfloat16()
        if k < steps:
            optimizer.step()
    if victim in optimizer.state[params[2]]:
        freed = optimizer.state[params[2]][victim]
    elif "gradient" in victim:
        freed = params[2].grad
    elif victim == "the parameter itself":
        freed = params[2]
    else:
        continue  # no state before the first step
    before = params[0].detach().clone()
    freed.untyped_storage().resize_(0)
    reads_it = "gradient" in victim or not steps  # the norm looks at weights and states only before the first step
    for what in (optimizer.step, *([optimizer.global_grad_norm] if reads_it else [])):
        try:
            what()
        except RuntimeError as error:
            words = victim.split(",")[0]
            number = 0 if "bucket" in victim else 2
            name = "abc"[number]
            assert f"parameter {number} ({name}.weight)" in str(error) and words in str(error), str(error)
            assert "was freed" in str(error)
        else:
            raise AssertionError((backend, victim, steps, what))
    assert reads_it or optimizer.global_grad_norm() == torch.tensor(120.0).sqrt()
    assert torch.equal(params[0], before)
    assert not steps or all(optimizer.state[param]["step"] == steps for param in params)
print("all refused")
"""


def test_freed_memory_is_refused_with_the_parameters_name(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = forkserver.run(script, [], timeout=280)
    assert (done.returncode, done.stdout) == (0, "all refused\n"), done.stderr


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_empty_tensors_and_memory_that_came_back_are_stepped(backend):
    params = [nn.Parameter(torch.ones(size).bfloat16()) for size in (0, 8)]
    optimizer = AdamW(params, lr=0.5, backend=backend)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    kept = params[1].detach().clone()
    size = params[1].untyped_storage().nbytes()
    params[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"parameter 1 cannot be stepped: the memory of the parameter itself"):
        optimizer.step()
    params[1].untyped_storage().resize_(size)
    params[1].data.copy_(kept)
    optimizer.step()
    assert torch.isfinite(params[1]).all() and not torch.equal(params[1], kept)
    assert optimizer.state[params[1]]["step"] == 3


def test_an_empty_gradient_costs_no_check_of_all_the_others(monkeypatch):
    """Shards of FSDP2 are often empty, and their address is 0."""
    params = [nn.Parameter(torch.ones(size).bfloat16()) for size in (0, 8)]
    optimizer = AdamW(params)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        monkeypatch.setattr(param_entry.ParamEntry, "check_memory", lambda *_: pytest.fail("on a standing plan"))


def test_low_addresses_are_ordinary(monkeypatch):
    monkeypatch.setattr(param_entry, "_LOW", 1 << 63)
    test_an_empty_gradient_costs_no_check_of_all_the_others(monkeypatch)


LARGE = (SMALLEST // 2 // 64, 64)


def stepped(param: nn.Parameter, **arguments) -> AdamW:
    optimizer = AdamW([param], **arguments)
    param.grad = torch.full_like(param, 0.01)
    optimizer.step()
    return optimizer


def states(optimizer: AdamW) -> dict[str, torch.Tensor]:
    (state,) = optimizer.state.values()
    return {name: value for name, value in state.items() if name != "step"}


def distances(tensors: list[torch.Tensor]) -> list[int]:
    """Bytes between neighbours on the circle that a page's addresses make, the last and the first included."""
    places = sorted(local_shard(tensor).data_ptr() % PAGE for tensor in tensors)
    return [(after - before) % PAGE for before, after in zip(places, [*places[1:], places[0]], strict=True)]


@pytest.mark.parametrize(
    ("arguments", "number"),
    [({"rounding": "stochastic"}, 2), ({"rounding": "kahan"}, 3), ({"rounding": "kahan", "amsgrad": True}, 4)],
)
def test_weight_and_states_share_a_page_evenly(arguments, number):
    param = nn.Parameter(torch.ones(LARGE, dtype=torch.bfloat16))
    tensors = [param, *states(stepped(param, **arguments)).values()]
    assert len(tensors) == number + 1
    # Even parts of a page, but for cutting down to whole lines of 64 bytes at both ends.
    assert min(distances(tensors)) > PAGE / len(tensors) - 64


def test_states_begin_on_a_line_also_where_the_weight_does_not():
    param = nn.Parameter(torch.ones(LARGE[0] + 1, 64, dtype=torch.bfloat16).view(-1)[3:-61].view(LARGE))
    assert param.data_ptr() % 64 == 6
    assert [value.data_ptr() % 64 for value in states(stepped(param)).values()] == [0, 0, 0]


def test_what_it_costs():
    large = nn.Parameter(torch.ones(LARGE, dtype=torch.bfloat16))
    for value in states(stepped(large)).values():
        assert value.untyped_storage().nbytes() == large.nbytes + PAGE
    small = nn.Parameter(torch.ones(LARGE[0] - 1, 64, dtype=torch.bfloat16))
    for value in states(stepped(small)).values():
        assert value.untyped_storage().nbytes() == small.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_are_zeros_of_the_parameters_shape(dtype):
    param = nn.Parameter(torch.ones(LARGE[::-1], dtype=torch.bfloat16).t())
    state = StoredState("exp_avg", role=1, dtype=dtype)
    made = zeros_apart(param, state, position=0, count=1)
    assert made.shape == param.shape
    assert made.dtype == dtype
    assert made.is_contiguous()
    assert not made.requires_grad
    assert not made.any()


def test_loaded_states_lie_apart_as_well():
    param = nn.Parameter(torch.linspace(-1, 1, SMALLEST // 2).bfloat16())
    optimizer = stepped(param)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    clone = nn.Parameter(param.detach().clone())
    resumed = AdamW([clone])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    offsets = [value.storage_offset() for value in states(optimizer).values()]
    assert offsets == [value.storage_offset() for value in states(resumed).values()]
    assert any(offsets)


def test_states_of_a_shard_are_distributed_as_it_is(mesh):
    plain = nn.Parameter(torch.linspace(-1, 1, SMALLEST // 2).bfloat16().view(LARGE))
    param = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    expected = states(stepped(plain, first_parameter=0))
    found = states(stepped(param, first_parameter=0))
    assert min(distances([param, *found.values()])) > PAGE / 4 - 64
    copied = copy.deepcopy(found)
    for name, value in found.items():
        like = torch.zeros_like(param, dtype=value.dtype)
        assert value._spec == like._spec, name
        assert torch.equal(value.full_tensor(), expected[name]), name
        assert torch.equal(copied[name].full_tensor(), expected[name]), name
    assert torch.equal(param.full_tensor(), plain)
