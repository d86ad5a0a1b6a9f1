"""Lines and progress bars: put together from pieces, shown in place on a terminal and once in a pipe."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.launch.output import MAX_LINE_BYTES, TAIL_LINES, LineAssembler, Screen


def _lines(*pieces: bytes) -> list[bytes]:
    lines: list[bytes] = []
    assembler = LineAssembler(lines.append)
    for piece in pieces:
        assembler.feed(piece)
    assembler.close()
    return lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"1/3\r2/3\r3/3\n", [b"3/3"]),
        (b"long line\rshort\n", [b"short"]),
        (b"\r1/2 ab\x08\x08\x08\x08\x08\x08\r2/2 c\n", [b"2/2 c"]),
        (b"|\x08/\x08-\x08\n", [b"-"]),
        (b"50%\x08\x08\x08100%\n", [b"100%"]),
        ("━━a\x08\x08b\n".encode(), ["━b".encode()]),
        (b"a\x08\x08\x08\x08b\n", [b"b"]),
        (b"\xff\xfe\x00\n", [b"\xff\xfe\x00"]),
        (b"done\r", [b"done"]),
    ],
)
def test_lines_are_what_a_terminal_would_show(data, lines):
    assert _lines(data) == lines


@given(st.text(alphabet="ab━\n\r\x08", max_size=40).map(str.encode), st.integers(1, 7))
def test_it_does_not_matter_where_the_output_is_cut(data, size):
    assert _lines(*(data[place : place + size] for place in range(0, len(data), size))) == _lines(data)


def test_a_line_without_end_comes_in_pieces():
    lines = _lines(*[b"x" * 50_000] * 4, b"\n")
    assert max(map(len, lines)) == MAX_LINE_BYTES
    assert b"".join(lines) == b"x" * 200_000


def test_the_last_lines_are_kept():
    assembler = LineAssembler(lambda line: None)
    assembler.feed(b"".join(b"%d\n" % number for number in range(100)))
    assert list(assembler.tail) == [b"%d" % number for number in range(100 - TAIL_LINES, 100)]


class _Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def _shown(data: bytes) -> list[bytes]:
    """What a terminal shows of this, where ESC [K after a return erases the line."""
    return [line.rpartition(b"\r\x1b[K")[2] for line in data.split(b"\n")]


def test_a_progress_bar_stays_at_the_bottom_of_a_terminal():
    terminal = _Terminal()
    screen = Screen(terminal)
    screen.progress(0, b"1/3")
    assert _shown(terminal.getvalue()) == [b"[worker 0] 1/3"]
    screen.line(1, b"hello")
    assert _shown(terminal.getvalue()) == [b"[worker 1] hello", b"[worker 0] 1/3"]
    screen.progress(0, b"2/3")
    screen.note(b"note")
    screen.line(0, b"3/3")
    screen.line(1, b"end")
    screen.close()
    assert _shown(terminal.getvalue()) == [
        b"[worker 1] hello",
        b"note",
        b"[worker 0] 3/3",
        b"[worker 1] end",
        b"",
    ]


def test_an_unfinished_line_is_ended_on_close():
    terminal = _Terminal()
    screen = Screen(terminal)
    screen.progress(0, b"1/3")
    screen.close()
    assert _shown(terminal.getvalue()) == [b"[worker 0] 1/3", b""]


def test_a_bar_wider_than_the_terminal_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    terminal = _Terminal()
    Screen(terminal).progress(0, "\x1b[32m━━━━━━━━━━\x1b[0m wide".encode())
    assert terminal.getvalue() == "[worker 0] ━━━━━━━━".encode()


@pytest.fixture
def piped(monkeypatch):
    """A screen that is no terminal, what comes out of it, and the seconds that its clock shows."""
    pipe = io.BytesIO()
    clock = [100.0]
    monkeypatch.setattr("tfdist.launch.output.time.monotonic", lambda: clock[0])
    return Screen(pipe), pipe, clock


def test_a_pipe_gets_a_bar_once_and_now_and_then(piped):
    screen, pipe, clock = piped
    screen.progress(0, b"1/9")
    clock[0] += 5
    screen.progress(0, b"2/9")
    clock[0] += 6
    screen.progress(0, b"3/9")
    screen.progress(0, b"4/9")
    screen.line(0, b"9/9")
    assert pipe.getvalue() == b"[worker 0] 3/9\n[worker 0] 9/9\n"


@pytest.mark.parametrize("flush", [False, True])
def test_a_line_printed_in_pieces_comes_once_in_a_pipe(flush, piped):
    """The worker was quiet for long before, and the launcher may look between two pieces."""
    screen, pipe, clock = piped
    assembler = LineAssembler(lambda line: screen.line(1, line))
    for later, data in [(0.0, b"start\n"), (60.0, b"DONE"), (0.1, b" "), (0.1, b"-12.38"), (0.1, b"\n")]:
        clock[0] += later
        assembler.feed(data)
        screen.progress(1, assembler.unfinished)
        if flush:
            screen.flush()
    assert pipe.getvalue() == b"[worker 1] start\n[worker 1] DONE -12.38\n"


def test_a_line_that_stays_unfinished_in_a_pipe_is_shown_once(piped):
    screen, pipe, clock = piped
    screen.line(1, b"start")
    clock[0] += 60
    screen.progress(1, b"Continue? ")
    screen.flush()
    assert pipe.getvalue() == b"[worker 1] start\n"
    for _ in range(100):  # nothing more comes, and the launcher goes on looking
        clock[0] += 0.5
        screen.flush()
    assert pipe.getvalue() == b"[worker 1] start\n[worker 1] Continue? \n"
    screen.line(1, b"Continue? ")
    assert pipe.getvalue() == b"[worker 1] start\n[worker 1] Continue? \n"
