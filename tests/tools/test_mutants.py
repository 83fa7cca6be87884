"""The faults that `make mutants` plants."""

from tools import mutants


def test_every_room_has_faults_that_can_be_planted_and_tests_that_exist():
    paths = {fault.path() for fault in mutants.read_faults()}
    package = mutants.ROOT / "hf_lowprec"
    rooms = {
        init.parent.relative_to(mutants.ROOT)
        for glob in ("*", "tools/*")
        for init in package.glob(f"{glob}/__init__.py")
    }
    assert len(rooms) > 5
    assert not [room for room in rooms if not any(path.is_relative_to(room) for path in paths)]
