r"""Turns the raw output of several workers into one stream in which every line names its worker.

Progress bars rewrite their line with `\r` and `\b`. On a terminal the newest such line stays at the bottom
and is rewritten there, whatever other workers print above it. In a file or a pipe only its last state is
written, when it ends, and, if that takes long, its state of the moment from time to time, so that a long epoch does
not look dead.
"""

import re
import shutil
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

MAX_LINE_BYTES = 1 << 16
"""A longer line is written in pieces of this size."""
TAIL_LINES = 40
"""How many of a worker's last lines are shown if it fails."""
_KEPT_LINES = 400
_STACKS = re.compile(rb"^(Fatal Python error: |tfdist: this process is at:|Thread 0x\w+ .*\(most recent call first\))")

_PIECES = re.compile(rb"\n|\r|\x08+|[^\n\r\x08]+")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE_LINE = b"\r\x1b[K"
_HEARTBEAT_S = 10.0
_UNFINISHED_S = 1.0


class LineAssembler:
    r"""Puts the output of one worker together to lines, following `\r` and `\b` as a terminal would.

    Text after a `\r` replaces the line, text after `\b` replaces as many of its last characters; at the end
    of a line both mean nothing.

    Args:
        emit: Called with each finished line, without its end.
    """

    def __init__(self, emit: Callable[[bytes], None]) -> None:
        """Starts with an empty line."""
        self._emit = emit
        self._line = bytearray()
        self._back = 0
        self._restart = False
        self._last: deque[bytes] = deque(maxlen=_KEPT_LINES)

    @property
    def unfinished(self) -> bytes:
        """What the line under way shows now."""
        return bytes(self._line)

    @property
    def tail(self) -> list[bytes]:
        """The last lines: those from which Python's stacks are printed, if any, for the innermost calls come first."""
        lines = list(self._last)
        stacks = [number for number, line in enumerate(lines) if _STACKS.match(line)]
        return lines[min([*stacks[:1], max(0, len(lines) - TAIL_LINES)]) :]

    def feed(self, data: bytes) -> None:
        """Takes the next output, cut anywhere.

        Args:
            data: Any bytes.
        """
        for piece in _PIECES.findall(data):
            if piece == b"\n":
                self._finish()
            elif piece == b"\r":
                self._restart = True
            elif piece[0] == 8:
                self._back += len(piece)
            else:
                self._write(piece)

    def close(self) -> None:
        """Ends the line under way, if there is one."""
        if self._line:
            self._finish()

    def _write(self, text: bytes) -> None:
        if self._restart:
            self._line.clear()
        elif self._back:
            shown = self._line.decode("utf-8", "surrogateescape")
            self._line[:] = shown[: -self._back].encode("utf-8", "surrogateescape")
        self._restart, self._back = False, 0
        self._line += text
        while len(self._line) > MAX_LINE_BYTES:
            rest = self._line[MAX_LINE_BYTES:]
            del self._line[MAX_LINE_BYTES:]
            self._finish()
            self._line += rest

    def _finish(self) -> None:
        line = bytes(self._line)
        self._line.clear()
        self._restart, self._back = False, 0
        self._last.append(line)
        self._emit(line)


class Screen:
    """The one stream that all workers' lines go to.

    Once the stream fails (a closed pipe, a terminal that has gone), `broken` is true and nothing more is
    written.

    Args:
        stream: A binary stream; a terminal gets lines rewritten in place.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """Finds out whether the stream is a terminal."""
        self._stream = stream
        self.broken = False
        self._in_place = stream.isatty()
        self._bottom: tuple[int, bytes] | None = None
        self._shown_at: dict[int, float] = {}
        self._unfinished: dict[int, tuple[bytes, float]] = {}
        self._under_way: dict[int, bytes] = {}

    def line(self, worker: int, text: bytes) -> None:
        """Writes a finished line of a worker.

        Args:
            worker: Its index.
            text: The line, without its end.
        """
        if self._bottom is not None and self._bottom[0] == worker:
            self._set_bottom(None)
        self._unfinished.pop(worker, None)
        if self._under_way.pop(worker, None) != text:  # else its last state is there already
            self.note(_prefix(worker) + text)
        self._shown_at[worker] = time.monotonic()

    def note(self, text: bytes) -> None:
        """Writes a line of the launcher itself, as it is.

        Args:
            text: The line, without its end.
        """
        bottom = self._bottom
        self._set_bottom(None)
        self._write(text + b"\n")
        self._set_bottom(bottom)

    def progress(self, worker: int, text: bytes) -> None:
        """Shows the line that a worker has under way.

        Args:
            worker: Its index.
            text: The line as far as it has come.
        """
        if not text:
            return
        if self._in_place:
            self._set_bottom((worker, text))
            return
        now = time.monotonic()
        self._shown_at.setdefault(worker, now)
        _, since = self._unfinished.get(worker, (b"", now))
        self._unfinished[worker] = (text, since)
        self._show_unfinished(now)

    def flush(self) -> None:
        """Passes on what was written so far, with the lines that have been unfinished for long."""
        self._show_unfinished(time.monotonic())
        if not self.broken:
            try:
                self._stream.flush()
            except OSError:
                self.broken = True

    def close(self) -> None:
        """Ends a line that is still under way at the bottom of a terminal."""
        bottom, self._bottom = self._bottom, None
        if bottom is not None:
            self._write(b"\n")
        self.flush()

    def _show_unfinished(self, now: float) -> None:
        """Writes the state of lines that have been under way for a while, of workers that have been quiet for long.

        A line that was just begun is left alone: it may be printed in pieces, and end in a moment.
        """
        for worker, (text, since) in self._unfinished.items():
            if now - since < _UNFINISHED_S or now - self._shown_at[worker] < _HEARTBEAT_S:
                continue
            if self._under_way.get(worker) != text:
                self.note(_prefix(worker) + text)
                self._under_way[worker] = text
                self._shown_at[worker] = now

    def _set_bottom(self, bottom: tuple[int, bytes] | None) -> None:
        if self._bottom is not None:
            self._write(_ERASE_LINE)
        self._bottom = bottom
        if bottom is not None:
            worker, text = bottom
            self._write(_fit(_prefix(worker) + text))

    def _write(self, data: bytes) -> None:
        if not self.broken:
            try:
                self._stream.write(data)
            except OSError:
                self.broken = True


def _prefix(worker: int) -> bytes:
    return b"[worker %d] " % worker


def _fit(line: bytes) -> bytes:
    """Cuts a line to the terminal's width, since a wrapped line cannot be rewritten in place."""
    width = shutil.get_terminal_size().columns - 1
    text = line.decode("utf-8", "surrogateescape")
    plain = _ESCAPES.sub("", text)
    return line if len(plain) <= width else plain[:width].encode("utf-8", "surrogateescape")
