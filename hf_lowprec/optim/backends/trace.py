"""Trace the step of a `KernelSpec` as a `torch.fx` graph of scalar operations.

Each formula is written once, as torch code. The compiled backends render these graphs (`graph_renderer.py`,
`c/c_source.py`, `triton/triton_source.py`), so a kernel performs the same operations in the same order as the `eager`
backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx

from hf_lowprec.optim.algorithm_interface import Formula
from hf_lowprec.optim.step.fused_step import evaluate, fused_step
from hf_lowprec.optim.step.kernel_spec import KernelSpec
from hf_lowprec.rounding import step_keys


def trace(spec: KernelSpec) -> fx.Graph:
    """Trace `fused_step` for one element.

    Inputs: `spec.tensors`, `scalar_<name>` for `spec.all_scalars`, `index` and `spec.key_names`. Outputs: the new
    weight, then the new states in the order of `spec.states`.
    """
    recorder = _Recorder()
    element = recorder.element(spec.tensors, spec.all_scalars)
    index = recorder.input("index")
    keys = dict(zip(spec.random_words, recorder.input_pairs(spec.key_names), strict=True))
    new_weight, new_state = fused_step(spec, element.weight, element.grad, element.state, element.scalars, index, keys)
    return recorder.graph([new_weight, *(new_state[stored.name] for stored in spec.states)])


def integer_inputs(spec: KernelSpec) -> set[str]:
    """Return the names of the inputs of `trace` that are integers; the others are floats."""
    return {"index", *spec.key_names, *spec.integer_tensors}


def trace_keys(spec: KernelSpec) -> fx.Graph:
    """Trace `step_keys` for one segment.

    Inputs: `step`, `index_high` and `spec.stream_names`. Outputs: the values of `spec.key_names`.
    """
    recorder = _Recorder()
    step, index_high = recorder.input("step"), recorder.input("index_high")
    streams = recorder.input_pairs(spec.stream_names)
    return recorder.graph([key for stream in streams for key in step_keys(*stream, step, index_high)])


def trace_tensor_means(spec: KernelSpec) -> fx.Graph:
    """Trace `spec.tensor_means` for one element.

    Inputs: `spec.tensors` and `scalar_<name>` for `spec.host_scalars`. Outputs: the values of the formulas.
    """
    return _trace_formulas(spec, [formula for _, formula in spec.tensor_means])


def trace_factored(spec: KernelSpec) -> fx.Graph:
    """Trace `spec.factored` for one element, with the inputs of `trace_tensor_means`."""
    return _trace_formulas(spec, [] if spec.factored is None else [spec.factored])


def _trace_formulas(spec: KernelSpec, formulas: Iterable[Formula]) -> fx.Graph:
    recorder = _Recorder()
    element = recorder.element(spec.tensors, spec.host_scalars)
    inputs = element.weight, element.grad, element.state, element.scalars
    return recorder.graph([evaluate(formula, spec, *inputs) for formula in formulas])


def used_inputs(graph: fx.Graph, names: Iterable[str]) -> list[str]:
    """Return those `names` of inputs that an operation of `graph` reads, in the given order."""
    used = {node.name for node in graph.nodes if node.op == "placeholder" and node.users}
    return [name for name in names if name in used]


@dataclass(frozen=True)
class _Element:
    """The symbolic inputs of one element's formulas."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, Tensor]


class _Recorder:
    """Creates symbolic inputs and records the operations applied to them.

    The inputs are `fx.Proxy` objects. They are typed as tensors because the traced functions are written for tensors.
    """

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._tracer = fx.proxy.GraphAppendingTracer(self._graph)

    def input(self, name: str) -> Tensor:
        return cast(Tensor, fx.Proxy(self._graph.placeholder(name), self._tracer))

    def input_pairs(self, names: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """Create inputs called `names`, in pairs of successive ones."""
        return [(self.input(first), self.input(second)) for first, second in zip(names[::2], names[1::2], strict=True)]

    def element(self, tensors: Iterable[str], scalars: Iterable[str]) -> _Element:
        """Create an input for an element of each of `tensors`, and one called `scalar_<name>` for each of `scalars`."""
        inputs = {name: self.input(name) for name in tensors}
        weight, grad = inputs.pop("param"), inputs.pop("grad")
        return _Element(weight, grad, inputs, {name: self.input(f"scalar_{name}") for name in scalars})

    def graph(self, results: Sequence[Tensor]) -> fx.Graph:
        """Return the graph that computes `results`, without operations that no result depends on."""
        self._graph.output(tuple(cast(fx.Proxy, result).node for result in results))
        self._graph.eliminate_dead_code()
        return self._graph
