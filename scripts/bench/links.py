"""Links of a given speed between two workers on one machine: two network namespaces joined by a veth pair."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator

LINKS = {"loopback": None, "1gbit": "1gbit", "200mbit": "200mbit"}


@dataclasses.dataclass(frozen=True)
class Link:
    """Where two workers run and find each other.

    Attributes:
        name: a key of LINKS.
        hosts: the address of each worker.
        prefixes: what a worker's command has to begin with.
    """

    name: str
    hosts: tuple[str, str]
    prefixes: tuple[tuple[str, ...], tuple[str, ...]]


def can_be_made() -> bool:
    """Whether links other than loopback can be made here: that takes root and iproute2."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextlib.contextmanager
def link(name: str) -> Iterator[Link]:
    """Makes the link of that name, and removes it in the end."""
    rate = LINKS[name]
    if rate is None:
        yield Link(name, ("127.0.0.1", "127.0.0.1"), ((), ()))
        return
    names = [f"tfdist-{os.getpid()}-{i}" for i in range(2)]
    hosts = ("10.203.0.1", "10.203.0.2")
    ends = [f"tfd{os.getpid() % 100000}v{i}" for i in range(2)]
    made: list[str] = []
    try:
        for namespace in names:
            _run("ip", "netns", "add", namespace)
            made.append(namespace)
        _run("ip", "-n", names[0], "link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for namespace, end, host in zip(names, ends, hosts, strict=True):
            _run("ip", "-n", namespace, "address", "add", f"{host}/24", "dev", end)
            for device in (end, "lo"):
                _run("ip", "-n", namespace, "link", "set", device, "up")
            shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", end, *shape)
        prefixes = tuple(("ip", "netns", "exec", namespace) for namespace in names)
        yield Link(name, hosts, prefixes)
    finally:
        for namespace in made:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
