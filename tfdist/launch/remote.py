"""Workers on other hosts: each is run there by an agent, to which a remote shell of this machine leads."""

import os
import platform
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import tfdist
from tfdist.cluster.address import cut
from tfdist.errors import EXIT_FAILED, PeerError
from tfdist.launch.agent_wire import (
    BEAT,
    BEAT_S,
    DUMP,
    LEASE_S,
    PROTOCOL,
    Hello,
    Order,
    read_ended,
    signal_line,
)
from tfdist.launch.failure import Failure, how
from tfdist.launch.hosts import Host, Hosts
from tfdist.launch.output import LineAssembler, Screen
from tfdist.launch.process import READ_BYTES, WorkerProcess, exit_code
from tfdist.launch.signals import CaughtSignals
from tfdist.launch.watchdog import Watchdog
from tfdist.launch.worker import signal_group

_LOST = 255
_CONFIRM_S = 5.0
_LINGER_S = 2.0
_ORDER_S = 10.0
_TICK_S = 0.02
_AT_ONCE = 8
_SHOWN_LINES = 5
_SHOWN_CHARACTERS = 600


class StartError(PeerError):
    """A host could not be used; the message says which, and why.

    Attributes:
        worker: The index of the worker that was to run there.
        host: The host.
        printed: What the remote shell has printed.
    """

    def __init__(self, message: str, worker: int, host: str, printed: Sequence[str]) -> None:
        super().__init__(message)
        self.worker = worker
        self.host = host
        self.printed = tuple(printed)

    def as_failure(self, after_s: float) -> Failure:
        """Returns what is told of it where the job may be started again."""
        return Failure(self.worker, self.host, EXIT_FAILED, str(self), self.printed, {}, None, after_s, time.time())


class RemoteWorker(WorkerProcess):
    """A worker on a host. Its process on this machine is the remote shell.

    Attributes:
        hello: What its agent has said; None while it has said nothing.
    """

    def __init__(self, index: int, host: Host, hosts: Hosts, screen: Screen, log: "BinaryIO | None") -> None:
        """Starts the remote shell, and through it the agent.

        Args:
            index: Which worker it is.
            host: Where it runs.
            hosts: How hosts are reached.
            screen: Where its lines are shown.
            log: Gets its output unchanged; unbuffered. None for no log.
        """
        process = subprocess.Popen(
            [*hosts.rsh, host.rsh_target, hosts.agent_command(os.environ, os.getcwd())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher alone, which passes it on
            bufsize=0,
        )
        super().__init__(index, host.target, process, screen, log)
        self._name = host.name
        self._shell = cut(shlex.join([*hosts.rsh, host.rsh_target]), _SHOWN_CHARACTERS)
        self._give_up_at = time.monotonic() + hosts.start_timeout
        self._timeout_s = hosts.start_timeout
        self.hello: Hello | None = None
        self._before = LineAssembler(self._hear_hello)
        self._aside = LineAssembler(self._hear_end)
        self._told: int | None = None
        self._told_at = self._killed_at = float("inf")
        self._farewell: str | None = None
        self._begun = False
        self._lock = threading.Lock()
        for stream in (process.stdin, process.stderr):
            os.set_blocking(stream.fileno(), False)

    @property
    def address(self) -> str:
        """Its address in the job; known after the hello."""
        return f"{self._name}:{self.hello.port}"

    @property
    def lost(self) -> bool:
        """Whether it counts as ended because the way to its host broke."""
        return self._farewell is not None

    def greet(self) -> bool:
        """Returns whether the agent has said hello; does not wait for it.

        Raises:
            StartError: It will not, has not in time, or is of another version.
        """
        status = exit_code(self._process)
        self._read_into(self._process.stdout.fileno(), self._before)
        self._read_into(self._process.stderr.fileno(), self._aside)
        if self.hello is None:
            if status is not None:
                raise self._cannot_start(f"could not be used: {self._shell} ended {how(status)}")
            if time.monotonic() > self._give_up_at:
                raise self._cannot_start(
                    f"has not answered within {self._timeout_s:g} s (--start_timeout): {self._shell}"
                )
            return False
        ours = (PROTOCOL, tfdist.__version__)
        if (self.hello.protocol, self.hello.tfdist) != ours:
            raise self._cannot_start(
                f"has tfdist {self.hello.tfdist} (protocol {self.hello.protocol}), and this machine has {ours[1]} "
                f"(protocol {ours[0]}); install the same on all"
            )
        if self.hello.python.split(".")[:2] != platform.python_version().split(".")[:2]:
            python = f"host {self.host} has Python {self.hello.python}, and this machine {platform.python_version()}"
            self._screen.note(f"tfdist launch: {python}".encode())
        return True

    def begin(self, order: Order) -> None:
        """Has the agent start the worker.

        Args:
            order: What to start.
        """
        self._begun = True
        line, deadline = order.to_line(), time.monotonic() + _ORDER_S
        with self._lock:
            while line and time.monotonic() < deadline:
                try:
                    line = line[os.write(self._process.stdin.fileno(), line) :]
                except BlockingIOError:
                    time.sleep(_TICK_S)
                except OSError:
                    return  # it has ended, and `poll` tells of it
        if line:
            signal_group(self.pid, signal.SIGKILL)

    def drain(self) -> None:
        """Passes on the output that is there now, what the remote shell has said of its end, and ends the last line."""
        super().drain()
        if self._farewell is not None:
            self._pass_on(self._farewell.encode() + b"\n")

    def poll(self) -> "int | None":
        """Returns the worker's exit code, minus the signal's number if a signal ended it; None while it runs.

        Where the way to the host broke this is 255, as ssh has it; where a killed worker's host does not answer,
        that it was killed.
        """
        if self._exit_code is not None:
            return self._exit_code
        status = exit_code(self._process)
        self._read_into(self._process.stderr.fileno(), self._aside)
        now = time.monotonic()
        if self._told is not None and (status is not None or now > self._told_at + _LINGER_S):
            self._exit_code = self._told
        elif status is not None:
            self._exit_code = status if status > 0 else _LOST
            self._farewell = f"tfdist launch: the connection to host {self.host} has ended: {self._shell} ended "
            self._farewell += how(status) + self._what_it_printed()
        elif now > self._killed_at + _CONFIRM_S:
            self._exit_code = -signal.SIGKILL
            self._farewell = (
                f"tfdist launch: host {self.host} does not answer; what runs there ends by itself within {LEASE_S:g} s"
            )
        return self._exit_code

    def signal(self, number: int) -> None:
        """Sends a signal to the worker and its children.

        Args:
            number: The signal.
        """
        if number == signal.SIGKILL:
            self._killed_at = min(self._killed_at, time.monotonic())
        self._tell(signal_line(number))

    def dump_stack(self) -> None:
        """Makes a worker that does not answer print where it is, if it is one of tfdist's, and ends it."""
        self._tell(DUMP)

    def beat(self) -> None:
        """Tells the agent that the launcher is there."""
        self._tell(BEAT)

    def reap(self) -> None:
        """Closes the connection, and waits a moment for the host to confirm the end of its worker."""
        with self._lock:
            self._process.stdin.close()
        deadline = min(self._killed_at, time.monotonic()) + (_CONFIRM_S if self._begun else 0.0)
        while exit_code(self._process) is None and time.monotonic() < deadline:
            if not self._take_silently():
                time.sleep(_TICK_S)
        if exit_code(self._process) is None:
            signal_group(self.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()

    def _tell(self, line: bytes) -> None:
        if self._lock.acquire(timeout=_TICK_S):
            try:
                os.write(self._process.stdin.fileno(), line)
            except (OSError, ValueError):
                pass  # it has ended; or nothing goes through to it, which ends its lease
            finally:
                self._lock.release()

    def _read_into(self, descriptor: int, lines: LineAssembler) -> None:
        while self.hello is None or lines is self._aside:
            try:
                data = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                lines.close()
                return
            lines.feed(data)

    def _take_silently(self) -> bool:
        try:
            return bool(os.read(self.fileno(), READ_BYTES))
        except BlockingIOError:
            return False

    def _hear_hello(self, line: bytes) -> None:
        if self.hello is None:
            self.hello = Hello.from_line(line)

    def _hear_end(self, line: bytes) -> None:
        code = read_ended(line)
        if code is not None and self._told is None:
            self._told, self._told_at = code, time.monotonic()

    def _printed(self) -> list[str]:
        lines = [line.decode(errors="replace").strip() for line in (*self._before.tail, *self._aside.tail)]
        return [line for line in lines if line][-_SHOWN_LINES:]

    def _what_it_printed(self) -> str:
        printed = self._printed()
        return f"; it printed: {cut(' | '.join(printed), _SHOWN_CHARACTERS)}" if printed else "; it printed nothing"

    def _cannot_start(self, what: str) -> StartError:
        message = f"host {self.host} (worker {self.index}) {what}{self._what_it_printed()}"
        return StartError(message, self.index, self.host, self._printed())


def start_agents(
    hosts: Hosts,
    places: Sequence[int],
    screen: Screen,
    logs: "Sequence[BinaryIO] | None",
    watchdog: Watchdog,
    caught: CaughtSignals,
    started: "list[WorkerProcess]",
) -> "int | None":
    """Starts an agent for each worker, and waits until all have said hello.

    Args:
        hosts: The hosts.
        places: Which of their places take part; the workers' indices are in their order.
        screen: Where messages go.
        logs: A file for each worker's output.
        watchdog: Ends the remote shells if the launcher is killed.
        caught: The signals sent to this process.
        started: Gets the workers as they are started.

    Returns:
        The signal that was sent to this process meanwhile, if one was.

    Raises:
        StartError: A host could not be used.
    """
    waiting: list[RemoteWorker] = []
    of_places = hosts.of_workers()
    to_start = [(index, of_places[place]) for index, place in enumerate(places)]
    while to_start or waiting:
        connecting = Counter(worker.host for worker in waiting)
        # sshd refuses some of too many connections that come at once.
        while to_start and connecting[to_start[0][1].target] < _AT_ONCE:
            index, host = to_start.pop(0)
            worker = RemoteWorker(index, host, hosts, screen, logs[index] if logs else None)
            started.append(worker)
            waiting.append(worker)
            connecting[host.target] += 1
            watchdog.guard(worker.pid)
        waiting = [worker for worker in waiting if not worker.greet()]
        if numbers := caught.take():
            return numbers[0]
        time.sleep(_TICK_S if waiting else 0.0)
    return None


@contextmanager
def kept_alive(workers: "Sequence[WorkerProcess]") -> Iterator[None]:
    """Tells the agents of workers again and again that the launcher is there, in a thread of its own.

    Args:
        workers: The workers; it may grow.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(BEAT_S):
            for worker in tuple(workers):
                if isinstance(worker, RemoteWorker):
                    worker.beat()

    thread = threading.Thread(target=run, name="tfdist-agents", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
