"""Simulate two machines on one computer: network namespaces, joined by a virtual cable that can be unplugged."""

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

CABLE = "cable0"
"""The network interface, on both machines."""
LOOPBACK = "lo"


class Machine:
    """A network namespace, which sees only its own interfaces.

    Args:
        name: unique on this computer.
        address: the machine's IPv4 address on the cable.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def command(self, *words: object) -> list[object]:
        """The command that runs `words` on this machine."""
        return ["ip", "netns", "exec", self.name, *words]

    def switch(self, interface: str, state: str) -> None:
        """Take an interface `"up"` or `"down"`."""
        ip("-n", self.name, "link", "set", interface, state)

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Let nothing pass through the cable inside."""
        self.switch(CABLE, "down")
        try:
            yield
        finally:
            self.switch(CABLE, "up")


def ip(*words: str) -> None:
    """Run the `ip` command; OSError if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Create two machines with a cable between them and no other network, and delete them at the end.

    Raises:
        OSError: this system, or this user, cannot create network namespaces.
    """
    unique = uuid.uuid4().hex[:8]
    first, second = (Machine(f"hf-lowprec-{unique}-{k}", f"10.77.0.{k}") for k in (1, 2))
    try:
        for machine in (first, second):
            ip("netns", "add", machine.name)
        ip("link", "add", CABLE, "netns", first.name, "type", "veth", "peer", "name", CABLE, "netns", second.name)
        for machine in (first, second):
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", CABLE)
            machine.switch(LOOPBACK, "up")
            machine.switch(CABLE, "up")
            ip("netns", "exec", machine.name, "true")
        yield first, second
    finally:
        for machine in (first, second):
            subprocess.run(["ip", "netns", "delete", machine.name], capture_output=True, timeout=30, check=False)
