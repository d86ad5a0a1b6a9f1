r"""How `tfdist launch --hosts` and its agents on the hosts talk, in lines, through the remote shell.

On its standard output the agent says one `Hello`; what follows there is the worker's output, unchanged. On
its standard input it gets one `Order`, then lines of `signal NUMBER`, `dump` and `beat`. On its standard error,
to which nothing of the worker goes, it says in the end how the worker has ended.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

PROTOCOL = 1
"""Grows with every change of these lines."""
BEAT_S = 5.0
"""Seconds between two beats of the launcher."""
LEASE_S = 60.0
"""An agent that has heard nothing for so many seconds ends its worker: the launcher cannot reach it any more."""
MAX_LINE_BYTES = 1 << 24

BEAT = b"beat\n"
DUMP = b"dump\n"

_HELLO = b"tfdist-agent "
_ENDED = b"tfdist-agent-ended "


@dataclass(frozen=True)
class Hello:
    """What an agent says first.

    Attributes:
        protocol: The version of these lines that it speaks.
        tfdist: The version of its tfdist.
        python: The version of its Python.
        port: A free port of its host, which it holds until the worker starts.
    """

    protocol: int
    tfdist: str
    python: str
    port: int

    def to_line(self) -> bytes:
        """Returns what travels; it begins a line of its own, whatever a login script has printed before."""
        return b"\n" + _HELLO + json.dumps(asdict(self)).encode("ascii") + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Hello | None":
        """Reads what came; None where it is no hello."""
        if not line.startswith(_HELLO):
            return None
        try:
            said = json.loads(line[len(_HELLO) :])
            return cls(int(said["protocol"]), str(said["tfdist"]), str(said["python"]), int(said["port"]))
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True)
class Order:
    """What an agent is to start.

    Attributes:
        command: The program and its arguments.
        env: Environment variables on top of those of the host.
        cwd: The working directory.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str

    def to_line(self) -> bytes:
        """Returns what travels."""
        return json.dumps({"command": list(self.command), "env": dict(self.env), "cwd": self.cwd}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Order | None":
        """Reads what came; None where it is no order."""
        try:
            said = json.loads(line)
            return cls(list(said["command"]), dict(said["env"]), str(said["cwd"]))
        except (ValueError, TypeError, KeyError):
            return None


def signal_line(number: int) -> bytes:
    """Returns the line that has an agent send a signal to its worker's process group."""
    return b"signal %d\n" % number


def ended_line(code: int) -> bytes:
    """Returns the line that tells how a worker has ended: its exit code, or minus the signal's number."""
    return b"\n%s%d\n" % (_ENDED, code)


def read_ended(line: bytes) -> "int | None":
    """Reads what `ended_line` has written; None where it is another line."""
    if not line.startswith(_ENDED):
        return None
    try:
        return int(line[len(_ENDED) :])
    except ValueError:
        return None
