"""Which owners of files are trusted, and how many symbolic links are followed; test_library_cache.py has the rest."""

import errno
import os
import stat

import pytest

from hf_lowprec.optim.backends import path_ownership as trusted_paths

NOBODY = 65534


def test_the_hosts_root_has_another_user_number_in_a_container(monkeypatch):
    """An unprivileged container sees all other users as one, which may be root where only root can write."""
    status = os.stat_result((stat.S_IFDIR | 0o755, 1, 1, 1, NOBODY, NOBODY, 0, 0, 0, 0))
    with pytest.raises(PermissionError):
        trusted_paths.check_owner(status, "it", allow_unmapped_root=True)
    monkeypatch.setattr(trusted_paths, "_unmapped_users", lambda: frozenset([NOBODY]))
    trusted_paths.check_owner(status, "it", allow_unmapped_root=True)
    with pytest.raises(PermissionError):
        trusted_paths.check_owner(status, "it")


def test_as_many_links_as_linux_does_are_followed(tmp_path):
    (tmp_path / "0").mkdir()
    for k in range(40):
        (tmp_path / str(k + 1)).symlink_to(str(k))
    assert trusted_paths.resolve(tmp_path / "40") == tmp_path / "0"
    (tmp_path / "41").symlink_to("40")
    with pytest.raises(OSError) as error:
        trusted_paths.resolve(tmp_path / "41")
    assert error.value.errno == errno.ELOOP
