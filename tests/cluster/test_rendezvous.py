"""The rendezvous over real sockets: workers that agree, disagree, never come; and strangers."""

import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.cluster import Agreement, Cluster, rendezvous
from tfdist.cluster.messages import MAX_LINE_BYTES, Hello, Reply
from tfdist.errors import PeerError, UsageError

pytestmark = pytest.mark.timeout(30)


def _clusters(workers: tuple[str, ...]) -> list[Cluster]:
    return [Cluster(workers, index, "test") for index in range(len(workers))]


def _connect(address: str) -> socket.socket:
    """Connects to a worker as soon as it listens."""
    host, port = address.split(":")
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=10)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise


@pytest.mark.parametrize("count", [2, 3])
def test_workers_agree_on_a_seed_and_leave_their_ports_free(count, addresses, meet, assert_free):
    workers = addresses(count)
    got = meet(_clusters(workers))
    assert isinstance(got[0], Agreement) and 0 <= got[0].seed < 2**31
    assert got == [got[0]] * count
    for address in workers:
        assert_free(address)


def test_can_meet_again_on_the_same_ports(addresses, meet):
    clusters = _clusters(addresses(3))
    seeds = set()
    for _ in range(5):
        got = meet(clusters)
        assert got == [got[0]] * 3
        seeds.add(got[0].seed)
    assert len(seeds) > 1


@pytest.mark.parametrize("seeds", [[7, 7, 7], [7, None, None], [None, None, 7], [0, None, 0]])
def test_the_given_seed_is_taken(seeds, addresses, meet):
    wanted = next(seed for seed in seeds if seed is not None)
    assert meet(_clusters(addresses(3)), seeds=seeds) == [Agreement(wanted)] * 3


def test_one_worker_agrees_with_itself():
    assert rendezvous(Cluster.local(), seed=3) == Agreement(3)
    assert 0 <= rendezvous(Cluster.local()).seed < 2**31


def test_different_seeds_are_refused_by_all(addresses, meet):
    got = meet(_clusters(addresses(2)), seeds=[1, 2])
    assert [type(error) for error in got] == [UsageError] * 2
    assert str(got[0]) == str(got[1]) and "worker 0: 1; worker 1: 2" in str(got[0])


@pytest.mark.parametrize("missing", [1, 2])
def test_a_worker_that_never_comes_is_named_by_all_others(missing, addresses, meet):
    clusters = _clusters(addresses(3))
    start = time.monotonic()
    got = meet([cluster for cluster in clusters if cluster.index != missing], timeout_s=1.0)
    assert time.monotonic() - start < 3
    for error in got:
        assert isinstance(error, PeerError), error
        assert f"worker {missing} ({clusters[missing].address}) did not come up within 1 s" in str(error)


def test_a_chief_that_never_comes_is_named_by_all_others(addresses, meet):
    clusters = _clusters(addresses(3))
    for error in meet(clusters[1:], timeout_s=1.0):
        assert isinstance(error, PeerError), error
        assert f"worker 0 ({clusters[0].address}) did not come up within 1 s" in str(error)


def test_workers_that_started_early_hear_of_the_missing_one_from_a_late_chief(addresses):
    clusters = _clusters(addresses(3))
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(rendezvous, clusters[1], timeout_s=2.0)
        # Its port is taken once it has started to wait.
        _connect(clusters[1].address).close()
        with pytest.raises(PeerError, match="worker 2 "):
            rendezvous(clusters[0], timeout_s=20.0)
        with pytest.raises(PeerError, match="worker 2 "):
            early.result()


def test_a_late_worker_is_waited_for(addresses):
    clusters = _clusters(addresses(2))
    with ThreadPoolExecutor(1) as pool:
        chief = pool.submit(rendezvous, clusters[0], timeout_s=20.0)
        _connect(clusters[0].address).close()
        assert rendezvous(clusters[1], timeout_s=20.0) == chief.result()


def test_different_lists_are_shown_to_all(addresses, meet):
    one, two, three, four = addresses(4)
    clusters = _clusters((one, two, three))
    got = meet([clusters[0], clusters[1], Cluster((one, four, three), 2, "test")])
    assert [type(error) for error in got] == [UsageError] * 3
    assert len({str(error) for error in got}) == 1
    assert f"workers 0, 1: {one}, {two}, {three}; worker 2: {one}, {four}, {three}" in str(got[0])


def test_a_list_that_is_too_short_is_shown_without_waiting_for_the_timeout(addresses, meet):
    one, two, three = addresses(3)
    start = time.monotonic()
    got = meet([Cluster((one, two, three), 0, "test"), Cluster((one, two), 1, "test")], timeout_s=25.0)
    assert time.monotonic() - start < 15
    for error in got:
        assert isinstance(error, UsageError), error
        assert "different lists of workers" in str(error)


def _say_hello(connection: socket.socket, hello: Hello) -> None:
    connection.sendall(hello.to_line())


def test_two_workers_that_claim_one_index(addresses, meet):
    workers = addresses(3)
    hello = Hello(1, workers, None, 10.0, 10.0)
    with ThreadPoolExecutor(1) as pool:
        chief = pool.submit(meet, [_clusters(workers)[0]])
        with _connect(workers[0]) as one, _connect(workers[0]) as two:
            _say_hello(one, hello)
            _say_hello(two, hello)
            replies = [Reply.from_line(connection.makefile("rb").readline()) for connection in (one, two)]
        (error,) = chief.result()
    assert isinstance(error, UsageError) and f"2 processes say that they are worker 1 ({workers[1]})" in str(error)
    assert [reply.usage_error for reply in replies] == [str(error)] * 2


def test_a_worker_that_was_restarted_may_come_again(addresses, meet):
    clusters = _clusters(addresses(3))
    with ThreadPoolExecutor(1) as pool:
        chief = pool.submit(meet, [clusters[0]])
        with _connect(clusters[0].address) as first_life:
            _say_hello(first_life, Hello(1, clusters[0].workers, 9, 10.0, 10.0))
        got = meet(clusters[1:]) + chief.result()
    assert got == [got[0]] * 3 and isinstance(got[0], Agreement)


def test_different_tensorflow_versions_are_refused(addresses, meet):
    workers = addresses(2)
    own = Hello(1, workers, None, 10.0, 10.0)
    with ThreadPoolExecutor(1) as pool:
        chief = pool.submit(meet, [_clusters(workers)[0]])
        with _connect(workers[0]) as other:
            _say_hello(other, dataclasses.replace(own, versions={**own.versions, "tensorflow": "1.15.0"}))
            (error,) = chief.result()
    assert isinstance(error, UsageError)
    assert "different versions of tensorflow" in str(error) and "worker 1: 1.15.0" in str(error)


def test_strangers_are_ignored(addresses, meet, assert_free):
    clusters = _clusters(addresses(3))
    with ThreadPoolExecutor(1) as pool:
        chief = pool.submit(meet, [clusters[0]])
        strangers = [_connect(clusters[0].address) for _ in range(5)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        strangers[1].sendall(bytes(range(256)) + b"\n{}\n")
        strangers[2].sendall(b'{"protocol": "tfdist-rendezvous-2", "index": 1}\n')
        with pytest.raises(OSError):  # cut off; the last one stays silent
            for _ in range(100):
                strangers[3].sendall(b"x" * MAX_LINE_BYTES)
        got = meet(clusters[1:]) + chief.result()
        for stranger in strangers:
            stranger.close()
    assert got == [got[0]] * 3 and isinstance(got[0], Agreement)
    assert_free(clusters[0].address)


def test_a_crowd_of_silent_strangers_does_not_keep_workers_out(addresses, meet):
    clusters = _clusters(addresses(2))
    with ThreadPoolExecutor(1) as pool:
        chief = pool.submit(meet, [clusters[0]])
        crowd = [_connect(clusters[0].address) for _ in range(300)]
        with pytest.raises(ConnectionResetError):  # the oldest ones make room
            crowd[0].recv(1)
        got = meet([clusters[1]]) + chief.result()
        for stranger in crowd:
            stranger.close()
    assert got == [got[0]] * 2 and isinstance(got[0], Agreement)


def test_a_foreign_server_in_the_place_of_the_chief(addresses, meet):
    workers = addresses(2)
    host, port = workers[0].split(":")
    done = threading.Event()
    with socket.create_server((host, int(port))) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(0.1)

        def serve() -> None:
            while not done.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.close()

        serving = pool.submit(serve)
        (error,) = meet([_clusters(workers)[1]], timeout_s=1.0)
        done.set()
        serving.result()
    assert isinstance(error, PeerError) and f"worker 0 ({workers[0]}) did not come up" in str(error)


def test_a_port_with_dying_connections_is_not_in_use(addresses, meet):
    workers = addresses(2)
    for address in workers:
        host, port = address.split(":")
        with socket.create_server((host, int(port))) as server:
            client = _connect(address)
            server.accept()[0].close()  # the end that closes first, here that of the port, keeps TIME_WAIT
            client.close()
    got = meet(_clusters(workers))
    assert got == [got[0]] * 2 and isinstance(got[0], Agreement)


@pytest.mark.parametrize("index", [0, 1])
def test_a_port_in_use_is_refused_at_once(index, addresses):
    workers = addresses(2)
    host, port = workers[index].split(":")
    with socket.create_server((host, int(port))):
        with pytest.raises(UsageError, match=f"port {port} is in use") as raised:
            rendezvous(Cluster(workers, index, "Slurm"), timeout_s=20.0)
    assert str(raised.value).startswith(f"Slurm gives worker {index}, this process, the address {workers[index]}, but")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("192.0.2.1:12345", "not an address of this machine"),
        ("999.0.2.1:12345", "the host 999.0.2.1 is not known here"),
        ("[fe80:::1]:12345", "the host fe80:::1 is not known here"),
        (f"{'x' * 70}.y:12345", "is not known here"),
    ],
)
def test_an_address_of_another_machine_is_refused_at_once(address, said, addresses):
    start = time.monotonic()
    with pytest.raises(UsageError, match=said) as raised:
        rendezvous(Cluster((*addresses(1), address), 1, "Kubernetes"), timeout_s=20.0)
    assert time.monotonic() - start < 5
    assert str(raised.value).startswith(f"Kubernetes gives worker 1, this process, the address {address}, but")


def _known_from(name: str, when: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a host name known from a moment on, as the DNS of Kubernetes does with a pod's."""
    look_up = socket.getaddrinfo

    def late(host: str, *args: object, **options: object) -> list:
        if host == name and time.monotonic() < when:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up("127.0.0.1" if host == name else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_waits_for_its_own_name_to_be_known(index, addresses, meet, monkeypatch):
    workers = list(addresses(2))
    workers[index] = workers[index].replace("127.0.0.1", "late-0.late")
    _known_from("late-0.late", time.monotonic() + 1.0, monkeypatch)
    got = meet(_clusters(tuple(workers)))
    assert got == [got[0]] * 2 and isinstance(got[0], Agreement)


def test_a_name_that_stays_unknown_is_told_when_the_time_is_up(addresses, caplog):
    start = time.monotonic()
    with pytest.raises(UsageError) as raised:
        rendezvous(Cluster((*addresses(1), "no-such-host.invalid:12345"), 1, "Kubernetes"), timeout_s=1.5)
    assert 1.5 <= time.monotonic() - start < 20
    assert str(raised.value).startswith(
        "Kubernetes gives worker 1, this process, the address no-such-host.invalid:12345, but the host "
        "no-such-host.invalid is not known here, also after 1.5 s ("
    )
    assert [record.getMessage() for record in caplog.records] == [
        "this worker's host name no-such-host.invalid is not known here yet; waiting for at most 1.5 s"
    ]


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"timeout_s": float("inf")}, {"seed": -1}, {"seed": True}])
def test_refuses_options(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        rendezvous(Cluster.local(), **options)
