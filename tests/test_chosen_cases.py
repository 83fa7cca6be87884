"""The short suite has every pair of values that the full one has, in few cases."""

import itertools

import pytest

from tests.support.chosen_cases import covering

NUMBERS = {"a": range(8), "b": range(5), "c": range(3), "d": range(2)}
PRODUCT = [dict(zip(NUMBERS, values, strict=True)) for values in itertools.product(*NUMBERS.values())]
ALLOWED = [case for case in PRODUCT if case["a"] < 6 or case["b"] == case["c"]]


def combinations(cases: list[dict[str, int]], size: int) -> set[tuple]:
    return {combination for case in cases for combination in itertools.combinations(case.items(), size)}


@pytest.mark.parametrize("begin", [0, 100])
@pytest.mark.parametrize(("size", "most"), [(1, 8), (2, 48), (3, 140)])
@pytest.mark.parametrize("cases", [PRODUCT, ALLOWED], ids=["product", "some are not allowed"])
def test_nothing_is_missing_and_the_cases_are_few(cases, size, most, begin):
    """At least 8, 8·5 and 8·5·3 cases are needed."""
    found = covering(cases, size, begin)
    assert combinations([cases[number] for number in found], size) == combinations(cases, size)
    assert len(set(found)) == len(found) <= most
    assert found == covering(cases, size, begin)
    assert found != covering(cases, size, begin + 7)


def test_parameters_that_only_some_cases_have():
    cases = [{"a": 1}, {"a": 1, "b": 1}, {"a": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 1}]
    assert covering(cases, 2) == [0, 1, 2, 3]
    assert covering([{"a": 1}], 2) == [0]


FILE = """
import pytest
@pytest.mark.parametrize("options", [{"x": x, "y": y} for x in range(3) for y in range(3)])
@pytest.mark.parametrize("z", range(3))
def test_pairs(options, z): pass
@pytest.mark.combinations(1)
@pytest.mark.parametrize("x", [1, 2, pytest.param(3, marks=pytest.mark.every_case)])
@pytest.mark.parametrize("y", range(3))
def test_values(x, y): pass
@pytest.mark.every_case
def test_at_night(): pass
"""


def test_what_pytest_collects(tmp_path, monkeypatch, request):
    """Entries of dicts are parameters; what a marker leaves out does not stand for others."""
    (tmp_path / "test_file.py").write_text(FILE)
    from tests import conftest

    class Plugin:
        pytest_collection_modifyitems = staticmethod(conftest.pytest_collection_modifyitems)
        items = ()

        def pytest_collection_finish(self, session):
            Plugin.items = [item.name for item in session.items]

    counts = []
    for every in (False, True):
        monkeypatch.setattr("tests.support.chosen_cases.EVERY_CASE", every)
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(tmp_path)], plugins=[Plugin()])
        counts.append([sum(word in name for name in Plugin.items) for word in ("pairs", "values", "night")])
    (pairs, *others), every_case = counts
    assert 9 <= pairs <= 12
    assert others == [3, 0]
    assert every_case == [27, 9, 1]
