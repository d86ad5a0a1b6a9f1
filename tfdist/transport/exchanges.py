"""Exchanges over MPI, as steps that never wait."""

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from tfdist.cluster.mpi import mpi
from tfdist.errors import UsageError

TAGS = 2
"""Tags of one exchange, from the one that it is given: one for each of its rounds."""
_ALIGNMENT = 64  # TensorFlow takes over arrays that are aligned so without a copy
_NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class Sum:
    """The sum of a buffer over all workers, in two rounds.

    In the first, worker i gets the i-th part of the buffer from all others and sums them in the order of the
    workers, so every run gives the same bits; in the second it sends the sum to all. That is the least that can be
    sent. MPI's own all-reduce is not used: it has to come in one order on all workers, while buckets go as they are
    ready, and it has no 16-bit numbers. Those are summed as 32-bit ones here, and rounded once.

    Args:
        communicator: an mpi4py communicator.
        buffer: of any shape; it must not change before the end.
        tag: the first of TAGS tags.
    """

    def __init__(self, communicator: Any, buffer: np.ndarray, tag: int):
        self.ended = False
        self.result = empty(buffer.shape, buffer.dtype)
        self._communicator, self._tag = communicator, tag
        self._in, self._out = buffer.reshape(-1), self.result.reshape(-1)
        workers = communicator.Get_size()
        self._others = others(communicator)
        edges = [self._in.size * i // workers for i in range(workers + 1)]
        self._parts = [slice(*edges[i : i + 2]) for i in range(workers)]
        own = self._parts[communicator.Get_rank()]
        self._received = {i: np.empty(own.stop - own.start, buffer.dtype) for i in self._others}
        self._first: dict[int, Transfer] = {}
        self._last: dict[int, Transfer] = {}
        self._sent: list[Transfer] = []
        self._summed = False

    def begin(self) -> None:
        """Sends and asks for the parts."""
        for other in self._others:
            self._first[other] = receive(self._communicator, self._received[other], other, self._tag)
            self._last[other] = receive(self._communicator, self._out[self._parts[other]], other, self._tag + 1)
        for other in self._others:
            self._sent.append(send(self._communicator, self._in[self._parts[other]], other, self._tag))

    def advance(self) -> bool:
        """Does what can be done now; returns whether another round, or the end, was reached."""
        if not self._summed:
            if not all_ended(self._first.values()):
                return False
            own = self._out[self._parts[self._communicator.Get_rank()]]
            self._sum(own)
            self._sent += [send(self._communicator, own, other, self._tag + 1) for other in self._others]
            self._summed = True
            return True
        self.ended = all_ended([*self._last.values(), *self._sent])
        return self.ended

    def missing(self) -> list[int]:
        """Returns the workers that something has still to come from."""
        waiting = self._last if self._summed else self._first
        return [other for other, request in waiting.items() if not request.ended]

    def _sum(self, own: np.ndarray) -> None:
        rank = self._communicator.Get_rank()
        parts = [self._received.get(i, self._in[self._parts[rank]]) for i in range(self._communicator.Get_size())]
        if own.dtype not in _NARROW:
            np.add(parts[0], parts[1], out=own)
            for part in parts[2:]:
                np.add(own, part, out=own)
            return
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total += part
        own[:] = total


class Gather:
    """A buffer of every worker, one row each.

    Args:
        communicator: an mpi4py communicator.
        buffer: of any shape; it must not change before the end.
        tag: the first of TAGS tags.
    """

    def __init__(self, communicator: Any, buffer: np.ndarray, tag: int):
        self.ended = False
        self.result = empty((communicator.Get_size(), *buffer.shape), buffer.dtype)
        self._communicator, self._buffer, self._tag = communicator, buffer, tag
        self._received: dict[int, Transfer] = {}
        self._sent: list[Transfer] = []

    def begin(self) -> None:
        """Sends the own row and asks for the others."""
        rank = self._communicator.Get_rank()
        for other in others(self._communicator):
            self._received[other] = receive(self._communicator, self.result[other], other, self._tag)
        self._sent = [send(self._communicator, self._buffer, other, self._tag) for other in others(self._communicator)]
        self.result[rank] = self._buffer

    def advance(self) -> bool:
        """Returns whether the end was reached."""
        self.ended = all_ended([*self._received.values(), *self._sent])
        return self.ended

    def missing(self) -> list[int]:
        """Returns the workers that something has still to come from."""
        return [other for other, request in self._received.items() if not request.ended]


class Rows:
    """The rows of all workers, one worker after the other: first how many each has, then the rows.

    Args:
        communicator: an mpi4py communicator.
        buffer: of shape (rows, ...); it must not change before the end.
        tag: the first of TAGS tags.
    """

    def __init__(self, communicator: Any, buffer: np.ndarray, tag: int):
        self.ended = False
        self.result = buffer
        self._communicator, self._buffer, self._tag = communicator, buffer, tag
        self._counts = np.zeros(communicator.Get_size(), np.int64)
        self._counts[communicator.Get_rank()] = len(buffer)
        self._others = others(communicator)
        self._first: dict[int, Transfer] = {}
        self._last: dict[int, Transfer] = {}
        self._sent: list[Transfer] = []

    def begin(self) -> None:
        """Sends the own rows, and asks for the others' numbers."""
        rank = self._communicator.Get_rank()
        for other in self._others:
            self._first[other] = receive(self._communicator, self._counts[other : other + 1], other, self._tag)
        for other in self._others:
            self._sent.append(send(self._communicator, self._counts[rank : rank + 1], other, self._tag))
            self._sent.append(send(self._communicator, self._buffer, other, self._tag + 1))

    def advance(self) -> bool:
        """Does what can be done now; returns whether another round, or the end, was reached."""
        if not self._last:
            if not all_ended(self._first.values()):
                return False
            self._ask()
            return True
        self.ended = all_ended([*self._last.values(), *self._sent])
        return self.ended

    def missing(self) -> list[int]:
        """Returns the workers that something has still to come from."""
        return [other for other, request in (self._last or self._first).items() if not request.ended]

    def _ask(self) -> None:
        self.result = empty((int(self._counts.sum()), *self._buffer.shape[1:]), self._buffer.dtype)
        ends = np.cumsum(self._counts)
        parts = [self.result[end - count : end] for end, count in zip(ends, self._counts, strict=True)]
        parts[self._communicator.Get_rank()][:] = self._buffer
        for other in self._others:
            self._last[other] = receive(self._communicator, parts[other], other, self._tag + 1)


Exchange = Sum | Gather | Rows


def others(communicator: Any) -> list[int]:
    """Returns all workers but this one."""
    return [i for i in range(communicator.Get_size()) if i != communicator.Get_rank()]


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array whose memory TensorFlow takes over without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


class Transfer:
    """One array on its way from or to another worker.

    Args:
        request: the MPI request.
        peer: the other worker.
        expected: bytes that have to come, or None where they go.
    """

    def __init__(self, request: Any, peer: int, expected: "int | None"):
        self._request, self._peer, self._expected = request, peer, expected
        self.ended = False

    def look(self) -> bool:
        """Moves it on; returns whether it has ended.

        Raises:
            UsageError: the other worker has sent an array of another size.
        """
        if self.ended:
            return True
        MPI = mpi()
        status = MPI.Status()
        try:
            self.ended = self._request.Test(status)
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise self._unequal("more") from None
            raise
        if self.ended and self._expected is not None and status.Get_count(MPI.BYTE) != self._expected:
            raise self._unequal(str(status.Get_count(MPI.BYTE)))
        return self.ended

    def _unequal(self, found: str) -> UsageError:
        return UsageError(
            f"worker {self._peer} sent {found} bytes where this one has {self._expected}: what a hook sends has to "
            "have the same shape and dtype on all replicas"
        )


def send(communicator: Any, array: np.ndarray, to: int, tag: int) -> Transfer:
    """Begins to send an array as bytes, which MPI has for every dtype."""
    return Transfer(communicator.Isend(_bytes(array), dest=to, tag=tag), to, None)


def receive(communicator: Any, array: np.ndarray, source: int, tag: int) -> Transfer:
    """Begins to receive an array."""
    return Transfer(communicator.Irecv(_bytes(array), source=source, tag=tag), source, array.nbytes)


def all_ended(transfers: Iterable[Transfer]) -> bool:
    """Moves all on; returns whether all have ended."""
    return all([transfer.look() for transfer in transfers])  # a list: each moves on with each look


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
