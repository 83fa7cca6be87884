"""Which instructions of a kernel are executed when every input is ordinary, by its branches alone.

A kernel branches where a rare input (zero, subnormal, infinite, NaN) needs more work: around the subroutines of
division and square root, and around code of its own. Such a branch adds instructions, and never an access to global
memory. So the ordinary path is the one that makes the most accesses with the fewest calls, and then with the fewest
instructions. If a kernel reads its elements once more for rare values, the path passes through both readings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

PLAIN, BRANCH, JUMP, CALL, EXIT = "plain", "branch", "jump", "call", "exit"
"""Kinds of instructions. A branch may be taken or not, a jump is taken, an exit ends the kernel or returns."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        opcode: its name with all modifiers.
        kind: what it does to control flow.
        target: label it branches to, or that it calls.
        conditional: whether a predicate may switch it off.
        access_bits: bits that a thread reads or writes in global memory; 0 for everything else.
    """

    opcode: str
    kind: str = PLAIN
    target: str | None = None
    conditional: bool = False
    access_bits: int = 0


Path = tuple[int, ...]
"""Positions of instructions, in the order in which they are executed."""
Weight = tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A loop: the position of its first instruction, those of its branches back to it, and all positions in it."""

    header: int
    latches: frozenset[int]
    body: frozenset[int]


class MachineCode:
    """The instructions of a kernel and of its subroutines, and the paths through them.

    Args:
        instructions: in the order of their addresses; the kernel begins with the first one.
        labels: positions in `instructions`, by label.

    Raises:
        ValueError: an instruction branches to a label that is not there.
    """

    def __init__(self, instructions: Sequence[Instruction], labels: dict[str, int]) -> None:
        self.instructions = instructions
        self.labels = labels
        for instruction in instructions:
            if instruction.kind in (BRANCH, JUMP) and instruction.target not in labels:
                raise ValueError(
                    f"{instruction.opcode} branches to {instruction.target!r}, which is not in the listing"
                )

    def successors(self, position: int) -> list[int]:
        """Positions that may be executed next. A call is followed by the instruction after it."""
        instruction = self.instructions[position]
        after = [position + 1] if position + 1 < len(self.instructions) else []
        if instruction.kind == EXIT:
            return after if instruction.conditional else []
        if instruction.kind == JUMP:
            return [self.labels[instruction.target or ""]]
        if instruction.kind == BRANCH:
            return [*after, self.labels[instruction.target or ""]]
        return after

    @cached_property
    def main_loop(self) -> Loop | None:
        """The loop whose iterations access the most of global memory, and the longest of these.

        None if the widest accesses are outside of all loops: the compiler has unrolled the one over full chunks.
        """
        widest = self._widest(self.ordinary_path())
        loops = [loop for loop in self._loops if widest and self._widest(loop.body) == widest]
        return max(loops, key=lambda loop: (self._accessed(self.ordinary_path(loop)), len(loop.body)), default=None)

    def ordinary_path(self, loop: Loop | None = None) -> Path:
        """The ordinary path through one iteration of `loop`, or from the kernel's beginning to its end.

        The latter passes through one iteration of each loop that it enters. A wide access counts more than several
        narrow ones with as many bits.
        """
        return self._path(loop, lambda instruction: (instruction.access_bits**2, *_shortness(instruction)))

    def path_around(self, loop: Loop) -> Path:
        """The shortest path from the kernel's beginning to `loop`, and from there to the kernel's end."""
        before = self._best(0, _shortness, lambda position: position == loop.header)
        left = {after for position in loop.body for after in self.successors(position)} - loop.body
        after = [self._best(position, _shortness, self._is_exit) for position in left]
        return (*before[:-1], *min(after, key=len, default=()))

    def longest_path(self, loop: Loop | None = None) -> int:
        """How many instructions are executed if every branch takes the longest way, subroutines included."""
        path = self._path(loop, lambda instruction: (1 + self._subroutine_length(instruction),))
        return sum(1 + self._subroutine_length(self.instructions[position]) for position in path)

    def _subroutine_length(self, instruction: Instruction) -> int:
        if instruction.kind != CALL or instruction.target not in self.labels:
            return 0
        return len(self._best(self.labels[instruction.target], lambda _: (1,), self._is_exit))

    def _path(self, loop: Loop | None, weight: Callable[[Instruction], Weight]) -> Path:
        if loop is None:
            return self._best(0, weight, self._is_exit)
        return self._best(loop.header, weight, loop.latches.__contains__, loop.body)

    def _is_exit(self, position: int) -> bool:
        return self.instructions[position].kind == EXIT

    def _best(
        self,
        begin: int,
        weight: Callable[[Instruction], Weight],
        ends: Callable[[int], bool],
        within: frozenset[int] | None = None,
    ) -> Path:
        """The path of largest weight from `begin` to a position that `ends` it, without branches back.

        Empty if there is none.
        """
        order, back_edges = self._depth_first(begin)
        best: dict[int, tuple[Weight, int | None]] = {}
        for position in order:  # successors come first
            if within is not None and position not in within:
                continue
            own = weight(self.instructions[position])
            ways: list[tuple[Weight, int | None]] = [(own, None)] if ends(position) else []
            for after in self.successors(position):
                if (position, after) not in back_edges and after in best:
                    ways.append((_sum(own, best[after][0]), after))
            if ways:
                best[position] = max(ways, key=lambda way: way[0])
        path: list[int] = []
        following: int | None = begin if begin in best else None
        while following is not None:
            path.append(following)
            following = best[following][1]
        return tuple(path)

    @cached_property
    def _loops(self) -> list[Loop]:
        latches: dict[int, set[int]] = {}
        for latch, header in self._depth_first(0)[1]:
            latches.setdefault(header, set()).add(latch)
        return [Loop(header, frozenset(ends), self._body(header, ends)) for header, ends in latches.items()]

    def _body(self, header: int, latches: Iterable[int]) -> frozenset[int]:
        """Everything from which a latch is reached without passing the header."""
        before: dict[int, list[int]] = {}
        for position in self._depth_first(0)[0]:
            for after in self.successors(position):
                before.setdefault(after, []).append(position)
        body, pending = {header}, list(latches)
        while pending:
            position = pending.pop()
            if position not in body:
                body.add(position)
                pending += before.get(position, [])
        return frozenset(body)

    def _depth_first(self, begin: int) -> tuple[list[int], set[tuple[int, int]]]:
        """Reachable positions in postorder, and the branches back to a position that is on the way.

        Compilers of GPU code emit loops with one entry, and then these are the branches that close a loop, whatever
        order branches are followed in.
        """
        order: list[int] = []
        back_edges: set[tuple[int, int]] = set()
        visited, on_the_way = {begin}, {begin}
        stack = [(begin, iter(self.successors(begin)))]
        while stack:
            position, pending = stack[-1]
            for after in pending:
                if after in on_the_way:
                    back_edges.add((position, after))
                elif after not in visited:
                    visited.add(after)
                    on_the_way.add(after)
                    stack.append((after, iter(self.successors(after))))
                    break
            else:
                stack.pop()
                on_the_way.discard(position)
                order.append(position)
        return order, back_edges

    def _widest(self, positions: Iterable[int]) -> int:
        return max((self.instructions[position].access_bits for position in positions), default=0)

    def _accessed(self, positions: Iterable[int]) -> int:
        return sum(self.instructions[position].access_bits ** 2 for position in positions)


def _shortness(instruction: Instruction) -> Weight:
    return (-(instruction.kind == CALL), -1)


def _sum(first: Weight, second: Weight) -> Weight:
    return tuple(a + b for a, b in zip(first, second, strict=True))
