"""Exchanges over MPI, as steps that never wait."""

from typing import Any

import ml_dtypes
import numpy as np

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
        self._others = [i for i in range(workers) if i != communicator.Get_rank()]
        edges = [self._in.size * i // workers for i in range(workers + 1)]
        self._parts = [slice(*edges[i : i + 2]) for i in range(workers)]
        own = self._parts[communicator.Get_rank()]
        self._received = {i: np.empty(own.stop - own.start, buffer.dtype) for i in self._others}
        self._first: dict[int, Any] = {}
        self._last: dict[int, Any] = {}
        self._sent: list[Any] = []
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
        return [other for other, request in waiting.items() if request]  # mpi4py: one that has ended is false

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
        self._received: dict[int, Any] = {}
        self._sent: list[Any] = []

    def begin(self) -> None:
        """Sends the own row and asks for the others."""
        rank = self._communicator.Get_rank()
        others = [i for i in range(self._communicator.Get_size()) if i != rank]
        for other in others:
            self._received[other] = receive(self._communicator, self.result[other], other, self._tag)
        self._sent = [send(self._communicator, self._buffer, other, self._tag) for other in others]
        self.result[rank] = self._buffer

    def advance(self) -> bool:
        """Returns whether the end was reached."""
        self.ended = all_ended([*self._received.values(), *self._sent])
        return self.ended

    def missing(self) -> list[int]:
        """Returns the workers that something has still to come from."""
        return [other for other, request in self._received.items() if request]  # mpi4py: one that has ended is false


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
        self._others = [i for i in range(communicator.Get_size()) if i != communicator.Get_rank()]
        self._first: dict[int, Any] = {}
        self._last: dict[int, Any] = {}
        self._sent: list[Any] = []

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
        return [other for other, request in (self._last or self._first).items() if request]

    def _ask(self) -> None:
        self.result = empty((int(self._counts.sum()), *self._buffer.shape[1:]), self._buffer.dtype)
        ends = np.cumsum(self._counts)
        parts = [self.result[end - count : end] for end, count in zip(ends, self._counts, strict=True)]
        parts[self._communicator.Get_rank()][:] = self._buffer
        for other in self._others:
            self._last[other] = receive(self._communicator, parts[other], other, self._tag + 1)


Exchange = Sum | Gather | Rows


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array whose memory TensorFlow takes over without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def send(communicator: Any, array: np.ndarray, to: int, tag: int) -> Any:
    """Begins to send an array as bytes, which MPI has for every dtype; returns the request."""
    return communicator.Isend(_bytes(array), dest=to, tag=tag)


def receive(communicator: Any, array: np.ndarray, source: int, tag: int) -> Any:
    """Begins to receive an array; returns the request."""
    return communicator.Irecv(_bytes(array), source=source, tag=tag)


def all_ended(requests: Any) -> bool:
    """Whether all requests have ended; those that have are asked again at no cost."""
    return all([request.Test() for request in requests])  # a list: every request moves on with each look


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
