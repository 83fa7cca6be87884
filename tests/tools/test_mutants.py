"""The faults that `make mutants` plants."""

from tools import mutants


def test_every_room_has_faults_that_can_be_planted_and_tests_that_exist():
    rooms = {fault.path().parts[1] for fault in mutants.read_faults()}
    assert rooms == {path.parent.name for path in (mutants.ROOT / "hf_lowprec").glob("*/__init__.py")}
