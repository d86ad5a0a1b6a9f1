"""Runs one worker on this host for `tfdist launch --hosts`, which starts it through ssh.

The worker and all its children in its process group end with the agent, however that ends: when the launcher or the
connection goes its standard input ends, and a watchdog is there for the case that the agent itself is killed.
"""

import os
import platform
import select
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import tfdist
from tfdist.cluster.ports import hold_ports
from tfdist.errors import EXIT_FAILED
from tfdist.launch.agent_wire import DUMP, LEASE_S, MAX_LINE_BYTES, PROTOCOL, Hello, Order, ended_line
from tfdist.launch.process import READ_BYTES, exit_code
from tfdist.launch.watchdog import Watchdog
from tfdist.launch.worker import dump_stack, signal_group

_STDIN, _STDOUT, _STDERR = range(3)
_QUIET_S = 0.2
_DRAIN_S = 10.0


class Lines:
    """The lines of a descriptor that has to say something now and then.

    Args:
        descriptor: What to read from.
        lease_s: For how many seconds it may say nothing.
    """

    def __init__(self, descriptor: int, lease_s: float = LEASE_S) -> None:
        self._descriptor = descriptor
        self._lease_s = lease_s
        self._rest = b""

    def next(self) -> "bytes | None":
        """Returns the next line with its end; None where nothing more comes, or nothing came for too long."""
        while b"\n" not in self._rest:
            if len(self._rest) > MAX_LINE_BYTES or not select.select([self._descriptor], [], [], self._lease_s)[0]:
                return None
            data = os.read(self._descriptor, READ_BYTES)
            if not data:
                return None
            self._rest += data
        line, end, self._rest = self._rest.partition(b"\n")
        return line + end


def main() -> int:
    """Says hello, takes its order, and runs the worker to its end.

    Returns:
        The worker's exit code, 128 plus the signal's number if a signal ended it.
    """
    lines = Lines(_STDIN)
    order = None
    with ExitStack() as held:
        port = hold_ports(1, held, host="0.0.0.0")[0]
        _write(_STDOUT, Hello(PROTOCOL, tfdist.__version__, platform.python_version(), port).to_line())
        while order is None:
            line = lines.next()
            if line is None or line.startswith(b"signal"):
                return EXIT_FAILED  # the job ends before it has begun
            order = Order.from_line(line)
    return _run(order, lines)


def _run(order: Order, lines: Lines) -> int:
    watchdog = Watchdog()
    try:
        process = subprocess.Popen(
            order.command,
            env={**os.environ, **order.env},
            cwd=order.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        print(f"cannot start {order.command[0]} in {order.cwd}: {error}", file=sys.stderr, flush=True)
        watchdog.close()
        return EXIT_FAILED
    watchdog.guard(process.pid)
    ended = threading.Event()
    copier = threading.Thread(target=_copy, args=(process.stdout.fileno(), ended), daemon=True)
    copier.start()
    threading.Thread(target=_obey, args=(process.pid, lines), daemon=True).start()
    code = exit_code(process, wait=True)
    signal_group(process.pid, signal.SIGKILL)
    ended.set()
    copier.join(_DRAIN_S)
    watchdog.close()
    _write(_STDERR, ended_line(code))
    return code if code >= 0 else 128 - code


def _copy(source: int, ended: threading.Event) -> None:
    """Passes the worker's output on; what has left its group may hold the pipe open after its end."""
    while True:
        if not select.select([source], [], [], _QUIET_S)[0]:
            if ended.is_set():
                return
            continue
        data = os.read(source, READ_BYTES)
        if not data or not _write(_STDOUT, data):
            return


def _obey(group: int, lines: Lines) -> None:
    """Does what the launcher says, and ends the worker when it says nothing more."""
    while (line := lines.next()) is not None:
        name, _, number = line.strip().partition(b" ")
        if line == DUMP:
            dump_stack(group)
        elif name == b"signal" and number.isdigit():
            signal_group(group, int(number))
    signal_group(group, signal.SIGKILL)


def _write(descriptor: int, data: bytes) -> bool:
    """Writes all; returns whether anybody takes it."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return False
    return True


if __name__ == "__main__":
    os._exit(main())  # whatever its threads wait for
