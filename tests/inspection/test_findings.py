"""A finding counts and names its tensors."""

from hf_lowprec.tools.inspection.findings import finding


def test_no_tensors_no_finding():
    assert finding("code", [], "{count}: {names}") == []
    (found,) = finding("code", ["a", "b", "a"], "{count}: {names}", noun="norm")
    assert found == ("code", "2 norms: a, b", ("a", "b"))
