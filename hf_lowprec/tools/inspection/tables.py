"""The facts of checkpoints as tables and lines for a terminal. Everything fits 80 columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from rich import box
from rich.table import Table

from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name
from hf_lowprec.rounding.modes import LOW_BITS_STATES
from hf_lowprec.tensor_names import PARAMETER_KINDS, listed
from hf_lowprec.tools.inspection.checkpoint import Checkpoint
from hf_lowprec.tools.inspection.comparison import Comparison
from hf_lowprec.tools.inspection.findings_in_one import counted
from hf_lowprec.tools.inspection.tensor_facts import TensorFacts

_MIB, _GIB = 2**20, 2**30


def size(nbytes: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{nbytes / _GIB:,.2f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:,.2f} MiB"


def share(part: float, whole: float) -> str:
    """A share in percent; empty for a share of nothing."""
    return f"{part / whole:.1%}" if whole else ""


def heading(checkpoint: Checkpoint) -> str:
    """One line on a checkpoint: weights, bytes, steps."""
    weights = sum(tensor.parameters for tensor in checkpoint.tensors.values())
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    steps = f", step {checkpoint.step:,}" if checkpoint.step is not None else ""
    return f"{checkpoint.name}: {counted(len(checkpoint.tensors), 'tensor')}, {weights:,} weights, {size(total)}{steps}"


def weights_table(checkpoint: Checkpoint) -> Table:
    """The weights by part of the model and dtype."""
    rows: dict[tuple[str, str], list[TensorFacts]] = defaultdict(list)
    for name, tensor in checkpoint.tensors.items():
        rows[checkpoint.kinds[name], dtype_name(tensor.dtype)].append(tensor)
    lost = f"lost at\n{checkpoint.update:.2g}"
    table = _table(("part", "dtype"), ("tensors", "weights", "MiB", "exactly\n1.0", "exactly\n0.0", lost))
    for (kind, dtype), tensors in sorted(rows.items(), key=lambda row: (PARAMETER_KINDS.index(row[0][0]), row[0][1])):
        weights = sum(tensor.parameters for tensor in tensors)
        coarse = sum(tensor.coarser_than(checkpoint.update) for tensor in tensors)
        cells = [f"{len(tensors):,}", f"{weights:,}", f"{sum(tensor.nbytes for tensor in tensors) / _MIB:,.2f}"]
        cells += [f"{sum(tensor.ones for tensor in tensors):,}", f"{sum(tensor.zeros for tensor in tensors):,}"]
        table.add_row(kind, dtype, *cells, share(coarse, weights if tensors[0].is_floating else 0))
    return table


def lines_on_one(checkpoint: Checkpoint) -> Iterator[str]:
    """Sentences about one checkpoint that are no findings."""
    norms = checkpoint.norms
    still = [name for name, norm in norms.items() if norm.at_initial_value]
    if norms:
        names = f" ({listed(still)})" if still else ""
        yield f"Norms at the initial value (all 1.0 or all 0.0): {len(still)} of {len(norms)}{names}."
    constant = [
        name for name, tensor in checkpoint.tensors.items() if tensor.constant is not None and name not in norms
    ]
    if constant:
        yield f"{counted(len(constant), 'other tensor')} with one value everywhere: {listed(constant)}."
    low = [tensor for tensor in checkpoint.tensors.values() if tensor.dtype in LOW_PRECISION_DTYPES]
    if low:
        keeping = (
            "Kahan summation keeps"
            if any(t.dtype == torch.float16 for t in low)
            else "split weights, Kahan summation and stochastic rounding keep"
        )
        coarse = share(sum(t.coarser_than(checkpoint.update) for t in low), sum(t.parameters for t in low))
        yield (
            f"Rounding to nearest would lose updates of {checkpoint.update:.2g} in {coarse} of the 16-bit weights, "
            f"whose spacing is more than twice as large; {keeping} them."
        )
    yield from _lines_on_optimizer(checkpoint)
    yield from checkpoint.unread


def _lines_on_optimizer(checkpoint: Checkpoint) -> Iterator[str]:
    low = any(tensor.dtype in LOW_PRECISION_DTYPES for tensor in checkpoint.tensors.values())
    groups = []
    for group in {id(state.group): state.group for state in checkpoint.states}.values():
        settings = [f"{key} {value:.3g}" for key, value in group.describe().items() if isinstance(value, float)]
        rounding = f"; 16-bit weights: rounding {group.rounding}" if group.rounding and low else ""
        groups.append(f"Param group of {group.optimizer}: {', '.join(settings)}{rounding}.")
    yield from dict.fromkeys(groups)
    nbytes: dict[tuple[str, str], int] = defaultdict(int)
    for state in checkpoint.states:
        for name, dtype in state.dtypes.items():
            nbytes[name, dtype_name(dtype)] += state.bytes_of(name)
    if nbytes:
        states = (f"{name} in {dtype} {size(total)}" for (name, dtype), total in nbytes.items())
        compensated = sum(state.compensation for state in checkpoint.states)
        stored = (pair for state in checkpoint.states for pair in state.dtypes.items())
        split = any(name in LOW_BITS_STATES and not dtype.is_floating_point for name, dtype in stored)
        kind = "remainder" if split else "compensation"
        kept = f"{kind} of {counted(compensated, 'tensor')}" if compensated else f"no {kind}"
        yield f"Optimizer state: {', '.join(states)}; {kept}."


def changes_table(comparison: Comparison) -> Table:
    """A table of what moved, by part of the model."""
    table = _table(("part",), ("tensors", "that\nmoved", "weights", "that\nmoved", "relative\ndistance"))
    rows: dict[str, list[str]] = defaultdict(list)
    for name in comparison.changes:
        rows[comparison.later.kinds[name]].append(name)
    for kind in (kind for kind in PARAMETER_KINDS if kind in rows):
        changes = [comparison.changes[name] for name in rows[kind]]
        weights, moved = sum(c.parameters for c in changes), sum(c.moved for c in changes)
        tensors = sum(c.moved > 0 for c in changes)
        distance, norm = sum(c.distance**2 for c in changes) ** 0.5, sum(c.norm**2 for c in changes) ** 0.5
        relative = f"{distance / norm:.2e}" if norm else ""
        table.add_row(kind, f"{len(changes):,}", f"{tensors:,}", f"{weights:,}", share(moved, weights), relative)
    return table


def lines_on_two(comparison: Comparison) -> Iterator[str]:
    """Sentences about two checkpoints that are no findings."""
    if comparison.steps is not None:
        yield f"{counted(comparison.steps, 'step')} between the two."
    unmoved = [name for name, change in comparison.changes.items() if not change.moved]
    which = f" ({listed(unmoved)})" if unmoved else ""
    yield f"The same bit for bit: {len(unmoved)} of {counted(len(comparison.changes), 'tensor')}{which}."
    for what, names in (("Only in the first", comparison.missing), ("Only in the second", comparison.added)):
        if names:
            yield f"{what}: {counted(len(names), 'tensor')} ({listed(names)})."
    if comparison.reshaped:
        changed = [f"{name} from {old} to {new}" for name, (old, new) in comparison.reshaped.items()]
        yield f"Another shape: {listed(changed)}."
    yield from comparison.notes
    yield from [*comparison.earlier.unread, *comparison.later.unread]


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
