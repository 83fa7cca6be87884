"""The page about other programs has a row and a section for each of hosts.toml, with the pinned version."""

import re

import pytest

from tests.hosts.__main__ import HOSTS, PAGE


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_has_a_row_and_a_section(name):
    page, host = PAGE.read_text(encoding="utf-8"), HOSTS[name]
    assert name in {heading.lower().replace(" ", "-") for heading in re.findall("^### (.+)$", page, re.MULTILINE)}
    row = next(line for line in page.splitlines() if line.startswith(f"| [{name}]"))
    assert host["run"] in row
    pins = dict(pin.split("==") for pin in (*host.get("without_deps", ()), *host["install"]) if "==" in pin)
    assert host.get("version", next(iter(pins.values()))) in row
