"""The hosts of `tfdist launch --hosts`, and how they are reached."""

import math
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster.address import shorten
from tfdist.cluster.sockets import address_towards
from tfdist.cluster.variables import begins_with, is_secret
from tfdist.errors import UsageError

DEFAULT_RSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
"""The remote shell, where none is given: asks for no password, and does not wait for long."""
START_TIMEOUT_S = 30.0
"""How long a host may take to answer, where nothing else is given."""

_HOST = re.compile(
    r"(?P<target>([A-Za-z0-9._][A-Za-z0-9._-]*@)?([A-Za-z0-9._][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]))"
    r"(:(?P<workers>[1-9][0-9]{0,3}))?"
)
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|\[::1\]", re.IGNORECASE)
_TRAVEL = ("TFDIST_", "TF_", "NCCL_", "KERAS_", "OMP_", "XLA_")


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        target: Its name as the user wrote it, `user@` and all.
        workers: How many workers run there.
    """

    target: str
    workers: int = 1

    @property
    def name(self) -> str:
        """Its name for the other workers."""
        return self.target.rpartition("@")[2]

    @property
    def rsh_target(self) -> str:
        """Its name for the remote shell, which wants no brackets around an IPv6 address."""
        return self.target.replace("[", "").replace("]", "")


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job.

    Attributes:
        hosts: The hosts; worker indices are in their order.
        rsh: The remote shell's command; a host and one command string are appended.
        python: The Python of all hosts.
        address: The address of this machine at which the workers reach the launcher; None to find it out.
        start_timeout: For how many seconds a host may not answer.
    """

    hosts: tuple[Host, ...]
    rsh: tuple[str, ...] = tuple(DEFAULT_RSH.split())
    python: str = sys.executable
    address: "str | None" = None
    start_timeout: float = START_TIMEOUT_S

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        rsh: "str | None" = None,
        python: "str | None" = None,
        address: "str | None" = None,
        start_timeout: "float | None" = None,
    ) -> "Hosts":
        """Reads what the user has written.

        Args:
            text: Hosts with commas between them; `h1:2` runs two workers on h1.
            rsh: The remote shell's command as in a shell; None for ssh.
            python: The path of Python on all hosts; None for that of this process.
            address: See `Hosts`.
            start_timeout: See `Hosts`; None for 30.

        Raises:
            UsageError: If something of this cannot be right.
        """
        found = cls(
            _read_hosts(text),
            tuple(DEFAULT_RSH.split()) if rsh is None else _read_rsh(rsh),
            sys.executable if python is None else python,
            address,
            START_TIMEOUT_S if start_timeout is None else start_timeout,
        )
        found.check()
        return found

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return sum(host.workers for host in self.hosts)

    def of_workers(self) -> tuple[Host, ...]:
        """Returns the host of each worker."""
        return tuple(host for host in self.hosts for _ in range(host.workers))

    def check(self) -> None:
        """Raises UsageError if something cannot be right on this machine; reaches no host."""
        local = [host.name for host in self.hosts if _LOOPBACK.fullmatch(host.name)]
        if local and len(local) < len(self.hosts):
            raise UsageError(
                f"hosts (--hosts): {local[0]} means another machine on each host; give the name that the other "
                "hosts know it by"
            )
        if shutil.which(self.rsh[0]) is None:
            raise UsageError(
                f"rsh={shorten(shlex.join(self.rsh))} (--rsh): there is no command {shorten(self.rsh[0])} on PATH; "
                "install the OpenSSH client, or give the command that runs commands on other hosts"
            )
        if not self.python:
            raise UsageError("python='' (--python): give the path of Python on the hosts")
        timeout = self.start_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise UsageError(f"start_timeout={timeout!r} (--start_timeout): a number of seconds above 0 is needed")
        if self.address is not None:
            _check_address(self.address)

    def own_address(self, places: Sequence[int]) -> str:
        """Returns the address of this machine at which the hosts reach it.

        Args:
            places: The places that take part; the address is that towards the first one's host.

        Raises:
            UsageError: If it cannot be found out.
        """
        if self.address is not None:
            return self.address
        name = self.of_workers()[places[0]].name
        try:
            return address_towards(name.strip("[]"))
        except OSError as error:
            raise UsageError(
                f"this machine does not know an address of the host {name} ({error}), and so not on which of its own "
                "addresses the hosts reach it; give that one, --address=IP"
            ) from None

    def agent_command(self, environ: Mapping[str, str], cwd: str) -> str:
        """Returns the command, for the shell of a host, that starts an agent there.

        Args:
            environ: The environment variables of this process; of them PYTHONPATH is set there.
            cwd: The working directory.
        """
        words = ["env", f"PYTHONPATH={environ['PYTHONPATH']}"] if "PYTHONPATH" in environ else []
        return f"cd {shlex.quote(cwd)} && exec {shlex.join([*words, self.python, '-m', 'tfdist.launch.agent'])}"


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns those environment variables that workers on other hosts get; none that seems to hold a secret."""
    return {
        name: value
        for name, value in environ.items()
        if name == "PYTHONPATH" or (begins_with(name, _TRAVEL) and not is_secret(name, value))
    }


def _read_hosts(text: str) -> tuple[Host, ...]:
    found = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if match is None:
            what = "an empty host" if not part.strip() else f"the host {shorten(part)}"
            raise UsageError(
                f"hosts={shorten(text)} (--hosts): {what} is not of the form NAME or NAME:WORKERS with WORKERS from 1 "
                "to 9999; write h1,h2 or h1:2,h2:2 ([fe80::1] for IPv6)"
            )
        found.append(Host(match["target"], int(match["workers"] or 1)))
    return tuple(found)


def _read_rsh(rsh: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(rsh))
    except ValueError as error:
        raise UsageError(f"rsh={shorten(rsh)} (--rsh): {error}; quote it as in a shell") from None
    if not words:
        raise UsageError(f"rsh={shorten(rsh)} (--rsh): a command is needed, such as 'ssh'")
    return words


def _check_address(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"address={shorten(address)} (--address): not an address of this machine that it can listen on "
            f"({getattr(error, 'strerror', None) or error}); give one of its IPs"
        ) from None


def check_options(*, mpi: bool, pin: "int | None", start_port: "int | None") -> None:
    """Raises UsageError where an option is given that works on this machine only."""
    given = {"mpi (--mpi)": mpi, "pin (--pin)": pin is not None, "start_port (--start_port)": start_port is not None}
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} is for workers on this machine only; leave it out, or leave out hosts (--hosts)")


def listed(hosts: "tuple[Host, ...]") -> str:
    """Returns the hosts as the user writes them."""
    return ",".join(host.target if host.workers == 1 else f"{host.target}:{host.workers}" for host in hosts)


def environment_options(options: "list[str]", environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Reads `--env NAME` and `--env NAME=VALUE`.

    Args:
        options: What was given.
        environ: Where the values of bare names are.

    Raises:
        UsageError: If a name is empty, or a bare name is not set.
    """
    found = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name:
            raise UsageError(f"env={shorten(option)} (--env): give NAME, or NAME=VALUE")
        if not equals and name not in environ:
            raise UsageError(f"env={shorten(option)} (--env): {name} is not set here; set it, or give {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found
