"""Starts MPI's exchanges, and moves them on."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.errors import PeerError
from tfdist.transport.exchanges import TAGS, Exchange, Gather, Rows, Sum

_BACKGROUND_POLL_S = 0.001
_POLL_S = 0.00002
_SPIN_S = 0.0005


class Engine:
    """The exchanges of one process.

    MPI moves data only while one of its functions runs. While the backward pass computes, perhaps on the same core, a
    thread calls one each millisecond. Whoever waits for an exchange has nothing else to do, and moves all of them on
    nearly without a rest; handing that to the thread would mean to wait for Python's lock at every turn.

    Args:
        communicator: an mpi4py communicator of its own, in which ranks are worker indices.
        peers: the address of each worker, for messages.
        timeout_s: how long an exchange may take.
    """

    def __init__(self, communicator: Any, peers: Sequence[str], *, timeout_s: float):
        self._communicator = communicator
        self._peers = tuple(peers)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._under_way: list[Exchange] = []
        self._tickets: dict[int, Exchange] = {}
        self._count = 0
        self._waiting = 0
        self._failure: BaseException | None = None
        threading.Thread(target=self._move_in_background, name="tfdist-mpi", daemon=True).start()

    def sum(self, buffer: np.ndarray, key: int) -> np.int64:
        """Begins to sum `buffer` over all workers; returns a ticket for `wait`."""
        return self._start(Sum(self._communicator, buffer, TAGS * int(key)))

    def gather(self, buffer: np.ndarray, key: int) -> np.int64:
        """Begins to gather `buffer` of all workers; returns a ticket for `wait`."""
        return self._start(Gather(self._communicator, buffer, TAGS * int(key)))

    def rows(self, buffer: np.ndarray, key: int) -> np.int64:
        """Begins to collect the rows of all workers; returns a ticket for `wait`."""
        return self._start(Rows(self._communicator, buffer, TAGS * int(key)))

    def wait(self, ticket: np.int64) -> np.ndarray:
        """Returns what the exchange gives.

        Raises:
            PeerError: it took too long; the message names the workers that nothing came from.
        """
        with self._changed:
            exchange = self._tickets.pop(int(ticket))
            self._waiting += 1
        try:
            self._move_until(exchange)
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify()
        return exchange.result

    def _start(self, exchange: Exchange) -> np.int64:
        with self._changed:
            exchange.begin()
            self._under_way.append(exchange)
            self._count += 1
            self._tickets[self._count] = exchange
            self._changed.notify()
            return np.int64(self._count)

    def _move_until(self, exchange: Exchange) -> None:
        moved_at = time.monotonic()
        deadline = moved_at + self._timeout_s
        while not exchange.ended:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                moved = self._advance()
            now = time.monotonic()
            if moved:
                moved_at = now
            elif now > deadline:
                silent = ", ".join(f"worker {i} ({self._peers[i]})" for i in exchange.missing())
                raise PeerError(
                    f"an exchange over MPI did not end within {self._timeout_s:g} s: nothing came from {silent}. Look "
                    "at its output; a worker that has stopped, or trains something else, holds all others up"
                )
            elif now > moved_at + _SPIN_S:
                time.sleep(_POLL_S)

    def _move_in_background(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way and not self._waiting)
                try:
                    self._advance()
                except BaseException as error:  # whoever waits next has to hear of it
                    self._failure = error
                    return
            time.sleep(_BACKGROUND_POLL_S)

    def _advance(self) -> bool:
        """Moves all exchanges on; returns whether one has got to its next round or to its end."""
        moved = [exchange.advance() for exchange in self._under_way]
        self._under_way = [exchange for exchange in self._under_way if not exchange.ended]
        return any(moved)
