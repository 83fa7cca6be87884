"""Steps in CUDA graphs are the steps, whatever happens outside of the graphs."""

import gc

import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW, Muon, StableAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
CAPTURABLE = [
    pytest.param({"capturable": True}, id="plain"),
    pytest.param({"capturable": True, "max_grad_norm": 0.1, "skip_nonfinite": True}, id="clipped"),
]


def two_layers() -> tuple[nn.Module, torch.Tensor]:
    """A module, the same every time, and a learning rate on the device."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).to("cuda", BF16)
    return module, torch.tensor(1e-2, device="cuda")


def backward(module: nn.Module, inputs: torch.Tensor) -> None:
    module(inputs).square().mean().backward()


def ready() -> nn.Parameter:
    param = nn.Parameter(torch.randn(100, device="cuda").to(BF16))
    param.grad = torch.randn_like(param)
    return param


def on_a_side_stream(action) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        action()
    torch.cuda.current_stream().wait_stream(stream)


def assert_same_training(module, optimizer, twin, other) -> None:
    torch.cuda.synchronize()
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, value in other.state[theirs].items():
            assert torch.equal(optimizer.state[mine][name], value), name


def muon(params, **options) -> Muon:
    params = list(params)
    return Muon(params, matrices=[param for param in params if param.ndim == 2], **options)


@pytest.mark.parametrize("static_gradients", [False, True], ids=["new gradients", "static gradients"])
@pytest.mark.parametrize("options", CAPTURABLE)
@pytest.mark.parametrize("make", [AdamW, StableAdamW, muon], ids=lambda make: make.__name__)
def test_a_captured_step_is_the_step(make, options, static_gradients):
    """Backward and step in a CUDA graph, replayed; rates change and steps are taken outside of it in between."""
    (module, lr), (twin, rate) = two_layers(), two_layers()
    optimizer = make(module.parameters(), lr=lr, **options)
    other = make(twin.parameters(), lr=rate, **options)
    inputs = [torch.randn(32, 64, device="cuda", dtype=BF16) for _ in range(9)]
    static = inputs[0].clone()

    def iteration(net, stepper, batch):
        stepper.zero_grad(set_to_none=not static_gradients)
        backward(net, batch)
        stepper.step()

    on_a_side_stream(lambda: iteration(module, optimizer, static))
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=not static_gradients)
    with torch.cuda.graph(graph):
        backward(module, static)
        optimizer.step()

    iteration(twin, other, inputs[0])
    for k, batch in enumerate(inputs[1:]):
        for value in (lr, rate):
            value.fill_(1e-2 * 0.9**k)
        if k in (2, 5):  # outside of the graph: gradients elsewhere, and one parameter without
            for net, stepper in ((module, optimizer), (twin, other)):
                kept = [param.grad for param in net.parameters()]
                generator = torch.Generator("cuda").manual_seed(k)
                for number, param in enumerate(net.parameters()):
                    param.grad = torch.randn(param.shape, generator=generator, device="cuda").to(BF16)
                    if k == 5 and number == 1:
                        param.grad = None
                stepper.step()
                for param, grad in zip(net.parameters(), kept, strict=True):
                    param.grad = grad
            gc.collect()
        static.copy_(batch)
        if static_gradients:
            optimizer.zero_grad(set_to_none=False)
        graph.replay()
        iteration(twin, other, batch)
    assert_same_training(module, optimizer, twin, other)
    if optimizer.max_grad_norm:
        assert torch.equal(optimizer.grad_norm, other.grad_norm)


def test_a_graph_of_two_steps_and_a_second_graph():
    (module, lr), (twin, rate) = two_layers(), two_layers()
    options = {"capturable": True, "max_grad_norm": 0.1}
    optimizer = AdamW(module.parameters(), lr=lr, **options)
    other = AdamW(twin.parameters(), lr=rate, **options)
    inputs = torch.randn(32, 64, device="cuda", dtype=BF16)

    def iteration(net, stepper):
        stepper.zero_grad()
        backward(net, inputs)
        stepper.global_grad_norm()
        stepper.step()

    on_a_side_stream(lambda: iteration(module, optimizer))
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for graph, steps in zip(graphs, (2, 1), strict=True):
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            for _ in range(steps):
                iteration(module, optimizer)
    for graph in (*graphs, graphs[0]):
        graph.replay()
    for _ in range(1 + 2 + 1 + 2):
        iteration(twin, other)
    assert_same_training(module, optimizer, twin, other)


def test_a_step_that_is_not_capturable_is_not_captured():
    param = ready()
    optimizer = AdamW([param])
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(graph):
        optimizer.step()


def test_capturing_without_a_step_before_says_what_to_do():
    param = ready()
    optimizer = AdamW([param], capturable=True)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="take one"), torch.cuda.graph(graph):
        optimizer.step()


def test_memory_of_captured_steps_is_given_back():
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def capture() -> None:
        param = nn.Parameter(torch.randn(1 << 20, device="cuda").to(BF16))
        param.grad = torch.randn_like(param)
        optimizer = AdamW([param], capturable=True)
        on_a_side_stream(optimizer.step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        graph.replay()
        torch.cuda.synchronize()

    capture()
    before = allocated()
    for _ in range(3):
        capture()
    assert allocated() == before
