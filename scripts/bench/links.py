"""Links of a given speed between two workers on one machine: two network namespaces joined by a veth pair."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

LINKS = {"loopback": None, "1gbit": "1gbit", "200mbit": "200mbit", "100mbit": "100mbit"}
_UP_S = 10.0


@dataclasses.dataclass(frozen=True)
class Link:
    """Where two workers run and find each other.

    Attributes:
        name: a key of LINKS.
        hosts: the address of each worker.
        prefixes: what a worker's command has to begin with.
        environments: what each worker needs so that MPI and Gloo take the link, and not the memory of the machine.
    """

    name: str
    hosts: tuple[str, str]
    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    environments: tuple[dict[str, str], dict[str, str]]


def can_be_made() -> bool:
    """Whether links other than loopback can be made here: that takes root and iproute2."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


@contextlib.contextmanager
def link(name: str) -> Iterator[Link]:
    """Makes the link of that name, and removes it in the end."""
    rate = LINKS[name]
    if rate is None:
        yield Link(name, ("127.0.0.1", "127.0.0.1"), ((), ()), ({}, {}))
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
        for namespace, end in zip(names, ends, strict=True):
            _wait_until_up(namespace, end)
        prefixes = tuple(("ip", "netns", "exec", namespace) for namespace in names)
        yield Link(name, hosts, prefixes, tuple(_over(end) for end in ends))
    finally:
        for namespace in made:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def _over(end: str) -> dict[str, str]:
    mpich = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": end}
    return {**mpich, "GLOO_SOCKET_IFNAME": end}


def _wait_until_up(namespace: str, end: str) -> None:
    """Waits for the kernel, which takes a moment to see that the other end is up as well."""
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        found = _run("ip", "-n", namespace, "-json", "link", "show", end)
        if json.loads(found)[0]["operstate"] == "UP":
            return
        time.sleep(0.01)
    raise TimeoutError(f"the link {end} in {namespace} did not come up within {_UP_S:g} s")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
