"""The cache of compiled libraries: damaged or untrusted files never run; a library that cannot be cached is built."""

import ctypes
import errno
import os
import signal
import stat
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from hf_lowprec import once
from hf_lowprec.optim.backends.c import library_cache
from hf_lowprec.optim.backends.c.compiler import compile_library, require_compiler

NAME = "step-0123.so"
NOBODY = 65534


def compiled(folder: Path, code: str) -> bytes:
    return compile_library(require_compiler(), code, folder)


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> bytes:
    return compiled(tmp_path_factory.mktemp("right"), "int answer(void) { return 42; }")


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> bytes:
    """A library that creates a file when it is loaded, before any function is called."""
    code = """
    #include <fcntl.h>
    __attribute__((constructor)) static void loaded(void) { open("planted-ran", O_CREAT | O_WRONLY, 0600); }
    int answer(void) { return 13; }
    """
    return compiled(tmp_path_factory.mktemp("planted"), code)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache. Temporary files have a folder of their own, which is the working directory, too."""
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o700)
    monkeypatch.chdir(temporary)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(once, "_said", set())
    return tmp_path / "cache"


def load(library: bytes | None) -> tuple[int, list[str]]:
    """Load `library` through the cache, None if it must be cached already; return `answer()` and the warnings."""

    def build(folder: Path) -> bytes:
        assert library is not None
        assert list(folder.iterdir()) == []
        return library

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = library_cache.load(NAME, ["answer"], build).answer()
    return answer, [str(warning.message) for warning in caught]


def write(file: Path, library: bytes, name: str = NAME) -> None:
    """Write a file as the cache does."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.touch(mode=0o600)
    file.write_bytes(library + library_cache._checksum(name, library))


def give_away(path: Path, monkeypatch) -> None:
    """Make another user the owner of `path`; without the right to do so, pretend to be another user."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1, follow_symlinks=False)
    else:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)


def test_a_library_is_built_once(cache, right):
    assert load(right) == (42, [])
    assert load(None) == (42, [])
    assert [path.name for path in cache.iterdir()] == [NAME]
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache / NAME).stat().st_mode) == 0o600


def truncated(file, planted):
    os.truncate(file, file.stat().st_size // 2)


def flipped(file, planted):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def garbage(file, planted):
    write(file, b"not a library")


def without_function(file, planted):
    write(file, planted.replace(b"answer", b"banned"))


def another_library(file, planted):
    write(file, planted, name="step-4567.so")


def group_writable(file, planted):
    write(file, planted)
    if os.geteuid() == 0:
        os.chown(file, -1, 12345)  # not the group that is root's alone
        file.chmod(0o620)
    else:
        file.chmod(0o602)


def world_writable(file, planted):
    write(file, planted)
    file.chmod(0o602)


DAMAGES = {
    truncated: "its checksum is wrong",
    flipped: "its checksum is wrong",
    garbage: "",  # the loader's own words
    without_function: "it has no function 'answer'",
    another_library: "its checksum is wrong",
    group_writable: "others can write to",
    world_writable: "others can write to",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_or_untrusted_library_is_built_again_with_one_warning(cache, right, planted, damage):
    load(right)
    damage(cache / NAME, planted)
    answer, messages = load(right)
    assert answer == 42
    (message,) = messages
    assert f"the cached step {cache / NAME} cannot be used and is compiled again: {DAMAGES[damage]}" in message
    assert load(None) == (42, [])
    if damage is not without_function:  # which is root's or this user's, and whole: nothing tells it apart before
        assert not Path("planted-ran").exists()


def test_another_users_file_is_not_read(cache, right, planted, monkeypatch):
    load(right)
    write(cache / NAME, planted)
    give_away(cache / NAME, monkeypatch)
    with pytest.raises(PermissionError, match="belongs to another user"):
        library_cache._read(cache / NAME)
    if os.geteuid() == 0:
        answer, messages = load(right)
        assert (answer, len(messages)) == (42, 1)
        assert load(None) == (42, [])
    assert not Path("planted-ran").exists()


def test_a_folder_in_place_of_the_library(cache, right):
    """The folder is not removed, and the library still loads."""
    (cache / NAME).mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    answer, messages = load(right)
    assert answer == 42
    assert len(messages) == 2
    assert (cache / NAME).is_dir()


def test_a_library_in_use_may_be_truncated(cache, right):
    """If the file itself were mapped, its pages would be gone (SIGBUS), as on NFS if another host replaces it."""
    load(right)
    library = library_cache.load(NAME, ["answer"], lambda folder: right)
    os.truncate(cache / NAME, 0)
    assert library.answer() == 42


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(cache, right, planted, mode):
    write(cache / NAME, planted)
    cache.chmod(mode)
    answer, (message,) = load(right)
    assert answer == 42
    assert f"others can write to {cache}; each process" in message
    assert "set HF_LOWPREC_CACHE to a folder that only this user can write to" in message
    assert [path.name for path in cache.iterdir()] == [NAME]
    assert load(right) == (42, [])  # said once
    assert not Path("planted-ran").exists()


def test_a_folder_of_another_user_is_not_used(cache, right, planted, monkeypatch):
    write(cache / NAME, planted)
    give_away(cache, monkeypatch)
    answer, (message,) = load(right)
    assert answer == 42
    assert f"{cache} belongs to another user" in message
    assert not Path("planted-ran").exists()


@pytest.mark.parametrize("private", [True, False])
def test_write_access_of_a_private_group_is_accepted(cache, right, monkeypatch, private):
    """Where every user has a private group, folders are created with mode 775."""
    members = [] if private else ["somebody"]
    monkeypatch.setattr(library_cache.pwd, "getpwuid", lambda uid: type("User", (), {"pw_name": "me"}))
    group = type("Group", (), {"gr_name": "me", "gr_mem": members})
    monkeypatch.setattr(library_cache.grp, "getgrgid", lambda gid: group)
    cache.mkdir()
    cache.chmod(0o770)
    answer, messages = load(right)
    assert (answer, len(messages)) == (42, 0 if private else 1)


def run_killed(action) -> None:
    """Run `action`, which ends in SIGKILL, in a fork."""
    child = os.fork()
    if not child:
        try:
            action()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def die(*args: object) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_temporary_files_of_killed_builds_are_removed(cache, right, monkeypatch):
    temporary = Path(tempfile.gettempdir())
    run_killed(lambda: library_cache.load(NAME, ["answer"], die))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        run_killed(lambda: load(right))
    left = [*temporary.iterdir(), *cache.iterdir()]
    assert [path.is_dir() for path in left] == [True, False]  # of the build, and of what it was about to publish
    theirs = cache / "tmp-of-somebody"
    theirs.mkdir()
    assert load(right) == (42, [])
    assert {path for path in left if path.exists()} == set(left)  # they may be in use
    hours_ago = time.time() - 7200
    for path in [*left, theirs]:
        os.utime(path, (hours_ago, hours_ago))
    (cache / NAME).unlink()
    assert load(right) == (42, [])
    assert [path for path in left if path.exists()] == []
    assert theirs.exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_nothing_and_says_so(cache, right, monkeypatch, call):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        answer, messages = load(right)
    assert answer == 42
    (message,) = messages
    assert "compiled steps cannot be cached: [Errno 28] No space left on device" in message
    assert list(cache.iterdir()) == []
    assert load(right) == (42, [])
    assert load(None) == (42, [])


def test_a_library_is_on_the_disk_before_it_has_its_name(cache, right, monkeypatch):
    calls = []
    synchronize, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda *args: (calls.append("fsync"), synchronize(*args)))
    monkeypatch.setattr(os, "replace", lambda *args: (calls.append("replace"), replace(*args)))
    load(right)
    assert calls == ["fsync", "replace"]


def test_without_temporary_files_the_cache_serves(cache, right, monkeypatch):
    """The folder for temporary files is missing, or others could replace its content."""
    for unusable in ("missing", "open"):
        folder = cache.parent / unusable
        if unusable == "open":
            folder.mkdir()
            folder.chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert load(right) == (42, [])
        (cache / NAME).unlink()
        assert not folder.exists() or list(folder.iterdir()) == []
    cache.chmod(0o777)
    with pytest.raises(OSError, match="others can write to"):
        load(right)


def test_a_path_may_be_relative_to_the_home_or_working_directory(cache, right, monkeypatch):
    home, here, there = cache.parent / "home", cache.parent / "here", cache.parent / "there"
    for folder in (home, here, there):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_LOWPREC_CACHE", "~/cache")
    monkeypatch.chdir(here)
    assert load(right) == (42, [])
    assert (home / "cache" / NAME).is_file()
    monkeypatch.setenv("HF_LOWPREC_CACHE", "nearby")
    library_cache._absolute.cache_clear()
    assert load(right) == (42, [])
    monkeypatch.chdir(there)
    assert load(None) == (42, [])
    assert (here / "nearby" / NAME).is_file()
    assert list(there.iterdir()) == []
    assert [path.name for path in here.iterdir()] == ["nearby"]
    there.rmdir()  # the working directory; an absolute path does without it
    library_cache._absolute.cache_clear()
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(home / "cache"))
    assert load(None) == (42, [])
    library_cache._absolute.cache_clear()


def test_the_default_follows_the_users_directories(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_LOWPREC_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    library_cache._absolute.cache_clear()
    for xdg, expected in (("", tmp_path / ".cache"), ("/var/here", Path("/var/here")), ("rel", tmp_path / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert library_cache.cache_dir() == expected / "hf_lowprec"
    monkeypatch.setenv("HF_LOWPREC_CACHE", "~no-such-user/cache")
    with pytest.raises(FileNotFoundError, match="~no-such-user/cache: Could not determine home"):
        library_cache.cache_dir()
    library_cache._absolute.cache_clear()


def test_the_checksum_does_not_keep_tools_from_reading_the_file(cache, right):
    load(right)
    assert ctypes.CDLL(str(cache / NAME)).answer() == 42


@pytest.mark.parametrize("which", ["HF_LOWPREC_CACHE", "temporary files"])
def test_circular_links_are_unusable_as_cache_and_as_temporary_folder(which, cache, right, tmp_path, monkeypatch):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    if which == "HF_LOWPREC_CACHE":
        monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path / "a" / "cache"))
        answer, caught = load(right)
        assert answer == 42
        assert "symbolic links" in caught[0] and str(tmp_path / "a") in caught[0]
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a" / "temporary"))
        assert load(right) == (42, [])  # built in the cache
