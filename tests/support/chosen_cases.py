"""Which cases the short suite runs, of a test with several parameters and of a script."""

import itertools
import os
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any
from zlib import crc32

import pytest

EVERY_CASE = bool(os.environ.get("HF_LOWPREC_EVERY_CASE"))


def nightly_except(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters, or tuples of them, of which the short suite takes those in `short`: others are for `every_case`."""
    marked = pytest.mark.every_case
    return [
        case if case in short else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=marked)
        for case in cases
    ]


def one_in_turn(options: Sequence[Any], number: int) -> Sequence[Any]:
    """Of the options of case `number` in a script, all or one, which is another one for the next case."""
    return options if EVERY_CASE else [options[number % len(options)]]


def chosen(tests: list[pytest.Function]) -> list[pytest.Function]:
    """Of the cases of one test, a few in which all pairs of values occur that occur in any of them.

    The marker `combinations(1)` asks for every value instead of every pair, `combinations(3)` for triples.
    """
    if not hasattr(tests[0], "callspec"):
        return tests
    marker = tests[0].get_closest_marker("combinations")
    cases = [dict(_values(test.callspec.params)) for test in tests]
    # Each test begins elsewhere, so that tests of one file choose different combinations.
    begin = crc32(tests[0].originalname.encode()) % len(tests)
    return [tests[number] for number in covering(cases, marker.args[0] if marker else 2, begin)]


def covering(cases: list[dict[str, Hashable]], size: int, begin: int = 0) -> list[int]:
    """Numbers of cases that have every combination of `size` values between them: always the one that adds most."""
    names = sorted({name for case in cases for name in case})
    new = [
        set(itertools.combinations([(name, case.get(name)) for name in names], min(size, len(names)))) for case in cases
    ]
    having = defaultdict(list)
    for number, combinations in enumerate(new):
        for combination in combinations:
            having[combination].append(number)
    order = [*range(begin, len(cases)), *range(begin)]
    found = []
    while any(new):
        best = max(order, key=lambda number: len(new[number]))
        found.append(best)
        for combination in list(new[best]):
            for number in having[combination]:
                new[number].discard(combination)
    return sorted(found)


def _values(params: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of parameters; the entries of a dict, also of one in a tuple, are parameters of their own."""
    for name, value in params.items():
        if isinstance(value, tuple) and any(isinstance(entry, dict) for entry in value):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            yield from _values({f"{name}.{key}": entry for key, entry in value.items()})
        else:
            yield name, _written(value)


def _written(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return hex(value)
