"""Monitor and pulses over real connections: who is heard, who is told, and where all stop."""

import contextlib
import json
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster.sockets import connect
from tfdist.errors import PeerError
from tfdist.liveness import Limits, Monitor, Pulse, Stops
from tfdist.liveness.beat import to_line
from tfdist.liveness.stops import Preempted

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def monitor():
    monitor = Monitor(["a:1", "b:2"], host="127.0.0.1", limits=Limits(1))
    yield monitor
    monitor.close()


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def speak(monitor, index, *messages, token=None):
    """Connects by hand, as a worker that says just this."""
    address, _, right = monitor.address.rpartition("/")
    connection = connect(address, 5)
    connection.sendall(to_line({"type": "hello", "index": index, "token": token or right, "pid": 1, "host": "h"}))
    for message in messages:
        connection.sendall(to_line(message))
    return connection


def beat(phase, **more):
    from tfdist.liveness.beat import Beat

    return Beat(phase, **more).to_message()


def test_workers_are_heard(monitor):
    pulses = [Pulse(index, monitor.address) for index in range(2)]
    for pulse in pulses:
        pulse.stepped(5, 0.1)
    until(lambda: [seen.beat is not None and seen.beat.step for seen in monitor.seen()] == [5, 5])
    assert monitor.verdict is None and monitor.steps() is None
    for pulse in pulses:
        pulse.enter("step")
    until(lambda: monitor.steps() == (5, 5))
    for pulse in pulses:
        pulse.enter("outside")
        pulse.close()
    until(lambda: all(seen.left and not seen.connected for seen in monitor.seen()))
    assert monitor.verdict is None


def test_a_lost_connection_is_told_to_the_others_at_once(monitor):
    heard = speak(monitor, 0, beat("step", step=3))
    other = speak(monitor, 1, beat("step", step=3))
    until(lambda: all(seen.beat for seen in monitor.seen()))
    other.close()
    began = time.monotonic()
    until(lambda: monitor.verdict is not None)
    assert time.monotonic() - began < 1
    assert monitor.verdict.workers == (1,)
    messages = read(heard, lambda found: any(m["type"] == "verdict" for m in found))
    (verdict,) = [message for message in messages if message["type"] == "verdict"]
    assert verdict["workers"] == [1] and "worker 1 (b:2, process 1 on h) has ended without a word" in verdict["text"]
    heard.close()


def test_a_silent_worker_is_found(monitor):
    both = [speak(monitor, index, beat("step", step=3)) for index in range(2)]
    talking = threading.Event()

    def talk():
        while not talking.wait(0.2):
            both[0].sendall(to_line(beat("step", step=3)))

    thread = threading.Thread(target=talk)
    thread.start()
    began = time.monotonic()
    until(lambda: monitor.verdict is not None)
    talking.set()
    thread.join()
    assert monitor.verdict.kind == "silent" and monitor.verdict.workers == (1,)
    assert 0.9 < time.monotonic() - began < 3
    for connection in both:
        connection.close()


def test_errors_that_come_from_a_loss_blame_who_was_lost(monitor):
    """As TensorFlow ends a collective ten seconds after a worker was stopped, before its time is up."""
    slow = Monitor(["a:1", "b:2"], host="127.0.0.1", limits=Limits(60))
    both = [speak(slow, index, beat("step", step=3)) for index in range(2)]
    until(lambda: all(seen.beat for seen in slow.seen()))
    time.sleep(2.6)
    both[0].sendall(to_line({"type": "failed", "why": "UnavailableError", "by_others": True}))
    until(lambda: slow.verdict is not None, 3)
    assert slow.verdict.workers == (1,)
    for connection in both:
        connection.close()
    slow.close()


@pytest.mark.parametrize(
    "line", [b"\n", b"GET / HTTP/1.1\r\n\r\n", b'{"type": "hello"}\n', b"[1]\n", b"\xff" * 70000, b'{"index": 99}\n']
)
def test_strangers_are_dropped(monitor, line):
    address = monitor.address.rpartition("/")[0]
    stranger = connect(address, 5)
    stranger.sendall(line)
    stranger.settimeout(5)
    try:
        assert stranger.recv(10) == b""
    except ConnectionError:
        pass
    wrong = speak(monitor, 0, token="0" * 32)
    wrong.settimeout(5)
    assert wrong.recv(10) == b""
    assert all(not seen.connected for seen in monitor.seen())
    stranger.close()
    wrong.close()


def test_nobody_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerError, match=f"worker 3: nothing answers at 127.0.0.1:{port}"):
        Pulse(3, f"127.0.0.1:{port}/x")


class Worker(threading.Thread):
    """A worker whose calls take turns with the others', as collectives make them."""

    def __init__(self, pulse, barrier, pace):
        super().__init__(daemon=True)
        self.pulse, self.barrier, self.pace = pulse, barrier, pace
        self.calls = 0

    def run(self):
        self.pulse.enter("step")
        try:
            while True:
                self.pulse.stops.begin()
                time.sleep(self.pace)
                self.barrier.wait(20)
                self.calls += 1
                self.pulse.stops.end()
        except Preempted:
            self.pulse.enter("outside")


@given(st.lists(st.floats(0, 0.01), min_size=2, max_size=4), st.floats(0.0, 0.1), st.integers(0, 3))
@settings(deadline=None, max_examples=15)
def test_all_stop_after_the_same_call(paces, after_s, who):
    count = len(paces)
    monitor = Monitor([f"w:{i + 1}" for i in range(count)], host="127.0.0.1")
    barrier = threading.Barrier(count)
    pulses = [Pulse(index, monitor.address) for index in range(count)]
    workers = [Worker(pulse, barrier, pace) for pulse, pace in zip(pulses, paces, strict=True)]
    until(lambda: all(seen.connected for seen in monitor.seen()))
    for worker in workers:
        worker.start()
    until(lambda: workers[0].calls > 0)
    time.sleep(after_s)
    pulses[who % count].request_stop("SIGTERM")
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()
    assert len({worker.calls for worker in workers}) == 1
    for pulse in pulses:
        pulse.close()
    monitor.close()


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["type", "token", "index", "hang_timeout", "phase", "step", "stage", "begun", "done", "still_s", "why", "pid"]
MESSAGES = st.fixed_dictionaries(
    {"type": st.sampled_from(["hello", "beat", "failed", "bye", "stop", "held"]) | ANY_VALUE},
    optional={name: ANY_VALUE for name in FIELDS if name != "type"},
)
LINES = MESSAGES.map(to_line) | st.binary(max_size=40).map(lambda data: data + b"\n") | st.just(b"[" * 60000 + b"\n")


@given(st.lists(LINES, max_size=6), st.booleans())
@settings(deadline=None, max_examples=150)
def test_nothing_that_comes_in_stops_the_monitor(lines, introduced):
    monitor = Monitor(["a:1", "b:2"], host="127.0.0.1", limits=Limits(5))
    if introduced:
        connection = speak(monitor, 0)
    else:
        connection = connect(monitor.address.rpartition("/")[0], 5)
    with connection:
        for line in lines:
            with contextlib.suppress(OSError):  # it has hung up
                connection.sendall(line)
        pulse = Pulse(1, monitor.address)
        until(lambda: monitor.seen()[1].connected)
        pulse.close()
    monitor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tfdist-monitor"]


def test_a_token_of_other_letters_is_refused(monitor):
    with speak(monitor, 0, token="é") as connection:
        assert connection.recv(100) == b""
    pulse = Pulse(1, monitor.address)
    until(lambda: monitor.seen()[1].connected)
    pulse.close()


def test_a_launcher_stops_only_workers_that_save(monitor):
    pulses = [Pulse(index, monitor.address) for index in range(2)]
    assert not monitor.ask_to_stop("place 1 is back")
    pulses[0].saves = True
    for pulse in pulses:
        pulse.enter("step")
    until(lambda: all(seen.matters for seen in monitor.seen()))
    assert not monitor.ask_to_stop("place 1 is back")
    pulses[1].saves = True
    until(lambda: all(seen.beat.saves for seen in monitor.seen()))
    barrier = threading.Barrier(2)
    workers = [Worker(pulse, barrier, 0.01) for pulse in pulses]
    for worker in workers:
        worker.start()
    until(lambda: workers[0].calls > 0)
    assert monitor.ask_to_stop("place 1 is back")
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()
    assert workers[0].calls == workers[1].calls
    for pulse in pulses:
        pulse.close()


def test_alone_a_stop_comes_after_the_call_at_hand():
    pulse = Pulse()
    pulse.stops.begin()
    pulse.stops.end()
    pulse.stops.begin()
    pulse.request_stop("SIGTERM")
    pulse.stops.end()
    with pytest.raises(Preempted) as caught:
        pulse.stops.begin()
    assert caught.value.code == 75


def test_who_is_behind_makes_up_for_it():
    stops = Stops()
    stops.begin()
    assert stops.hold() == {"type": "held", "begun": 1, "done": 0}
    threading.Timer(0.2, lambda: stops.stop_after(2)).start()
    stops.end()
    stops.begin()
    stops.end()
    with pytest.raises(Preempted):
        stops.begin()


def read(connection, enough):
    """Returns the messages that come until `enough` says so."""
    connection.settimeout(10)
    data = b""
    while True:
        data += connection.recv(65536)
        messages = [json.loads(line) for line in data.split(b"\n")[:-1]]
        if enough(messages):
            return messages


def test_an_error_that_the_script_has_caught_is_forgotten(monitor):
    pulse = Pulse(0, monitor.address)
    pulse.enter("start")
    pulse.failed("UsageError: batch_size=7", by_others=False, for_good=True)
    until(lambda: monitor.seen()[0].for_good and monitor.seen()[0].failed == "UsageError: batch_size=7")
    pulse.enter("outside")
    pulse.enter("start")
    until(lambda: not monitor.seen()[0].for_good and monitor.seen()[0].failed is None)
    pulse.close()
