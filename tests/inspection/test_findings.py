"""A finding counts and names its tensors."""

from hf_lowprec.tools.inspection.findings_in_one import finding


def test_no_tensors_no_finding():
    assert finding("damaged", [], "{count}: {names}") == []
    (found,) = finding("damaged", ["a", "b", "a"], "{count}: {names}", noun="norm")
    assert found == ("damaged", "The checkpoint is damaged: 2 norms: a, b.", ("a", "b"))
