"""Divide a traced step into loops over the elements of a block, for languages that compute one element at a time.

A block's scale depends on all of its elements, so a loop over them has to end before the next begins. Each use of
`block_max` ends a loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from hf_lowprec.optim.backends.renderer import output_nodes
from hf_lowprec.rounding.block_floats import block_max
from hf_lowprec.rounding.random_bits import weyl


@dataclass
class BlockLoop:
    """One loop over the elements of a block.

    Attributes:
        before: operations of which the whole block needs one result, computed before the loop.
        operations: operations that are performed for each element.
        maxima: operations `block_max` whose operands this loop computes.
        loaded: inputs that differ between elements, all in the first loop.
        kept: values of elements that later loops need, computed or loaded in this one.
        restored: values of elements that this loop needs, computed or loaded in earlier ones.
        outputs: positions of the graph's outputs that are known for each element in this loop.
        block_outputs: positions of the graph's outputs of which the block has one, known before this loop.
    """

    before: list[fx.Node] = field(default_factory=list)
    operations: list[fx.Node] = field(default_factory=list)
    maxima: list[fx.Node] = field(default_factory=list)
    loaded: list[fx.Node] = field(default_factory=list)
    kept: list[fx.Node] = field(default_factory=list)
    restored: list[fx.Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    block_outputs: list[int] = field(default_factory=list)


def block_loops(graph: fx.Graph, elements: Collection[str]) -> list[BlockLoop]:
    """Divide the operations of `graph` into loops.

    Args:
        graph: from `trace`.
        elements: names of the inputs that differ from element to element.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    operations = [node for node in graph.nodes if node.op == "call_function" or node.op == "call_method"]
    results = output_nodes(graph)
    varies = {node: node.name in elements for node in inputs}
    from_tensors = {node: node.name in elements for node in inputs}
    loop = dict.fromkeys(inputs, 0)
    for node in operations:
        args = node.all_input_nodes
        is_max = node.target is block_max
        varies[node] = not is_max and (node.target is weyl or any(varies[arg] for arg in args))
        from_tensors[node] = any(from_tensors[arg] for arg in args)
        loop[node] = max((loop[arg] for arg in args), default=0) + is_max
    for node in reversed(operations):
        # Random words are computed where they are first used, instead of being kept from an earlier loop. So is what
        # follows from one other value of the element: keeping that one takes no more.
        users = [loop[user] - (user.target is block_max) for user in node.users if user in loop]
        follows_from_one = varies[node] and sum(varies[arg] for arg in node.all_input_nodes) == 1
        if users and (not from_tensors[node] or follows_from_one):
            loop[node] = max(loop[node], min(users))

    loops = [BlockLoop() for _ in range(max(loop.values()) + 1)]
    for node in operations:
        part = loops[loop[node]]
        if node.target is block_max:
            loops[loop[node] - 1].maxima.append(node)
        else:
            (part.operations if varies[node] else part.before).append(node)
    for node in [*inputs, *operations]:
        if not varies[node]:
            continue
        uses = [loop[user] - (user.target is block_max) for user in node.users if user in loop]
        uses += [loop[node]] * (node in results)
        first = loop[node]
        if node.op == "placeholder" and uses:
            loops[first].loaded.append(node)  # before an output overwrites it
        later = sorted({use for use in uses if use > first})
        if later:
            loops[first].kept.append(node)
        for use in later:
            loops[use].restored.append(node)
    for position, node in enumerate(results):
        part = loops[loop[node]]
        (part.outputs if varies[node] else part.block_outputs).append(position)
    return loops
