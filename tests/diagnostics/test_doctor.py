"""`tfdist doctor`, as a user runs it: real workers on loopback, with planted faults."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts.bench.links import can_be_made, link
from tfdist.cli import main
from tfdist.cluster import Cluster
from tfdist.cluster.ports import HOST, hold_ports
from tfdist.diagnostics.doctor.data import Contents, check_data, contents
from tfdist.diagnostics.doctor.files import Marks
from tfdist.diagnostics.doctor.job import examine
from tfdist.diagnostics.doctor.report import Report, Status
from tfdist.diagnostics.doctor.wire import PROTOCOL, Channel, Server
from tfdist.diagnostics.doctor.worker import Options, Worker
from tfdist.errors import PeerError

_COMMAND = [sys.executable, "-m", "tfdist.cli", "doctor"]


def addresses(count: int, host: str = HOST) -> tuple[str, ...]:
    with ExitStack() as held:
        return tuple(f"{host}:{port}" for port in hold_ports(count, held))


def together(clusters: list[Cluster], options: list[Options]) -> list[Report]:
    """Runs workers in threads: the sockets and files are real, and TensorFlow is imported once."""
    with ThreadPoolExecutor(len(clusters)) as pool:
        return list(pool.map(lambda one: examine(*one, lambda _: None), zip(clusters, options, strict=True)))


def job(options: list[Options]) -> Report:
    where = addresses(len(options))
    reports = together([Cluster(where, index, "test") for index in range(len(options))], options)
    assert all(report == reports[0] for report in reports)
    return reports[0]


def joined(cluster: Cluster) -> Channel:
    """Joins worker 0 by hand, to behave otherwise than a worker should from there on."""
    hello = {"protocol": PROTOCOL, "op": "join", "index": cluster.index, "workers": list(cluster.workers)}
    for _ in range(1000):
        try:
            channel = Channel.to(cluster.workers[0], "worker 0", 1.0)
            assert channel.ask(hello, 50.0) == {"op": "welcome"}
            return channel
        except PeerError:
            time.sleep(0.05)
    raise TimeoutError("worker 0 did not come up")


def results(report: Report) -> dict[str, tuple[Status, str]]:
    return {finding.check: (finding.status, finding.found) for finding in report.findings}


def start(
    where: tuple[str, ...],
    index: int,
    *arguments: str,
    prefix: tuple[str, ...] = (),
    variables: "dict[str, str] | None" = None,
) -> subprocess.Popen:
    config = json.dumps({"cluster": {"worker": where}, "task": {"type": "worker", "index": index}})
    return subprocess.Popen(
        [*prefix, *_COMMAND, *arguments],
        env={**os.environ, **(variables or {}), "TF_CONFIG": config},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(workers: list[subprocess.Popen]) -> list[tuple[int, str]]:
    try:
        outputs = [worker.communicate(timeout=150) for worker in workers]
        assert not any("Traceback" in text for output in outputs for text in output), outputs
        return [(worker.returncode, out) for worker, (out, _) in zip(workers, outputs, strict=True)]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.communicate()


def test_two_workers_that_it_starts_itself(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_bytes(b"abc" * 1000)
    (tmp_path / "shared").mkdir()
    found = subprocess.run(
        [
            *_COMMAND,
            "--workers=2",
            f"--checkpoint_dir={tmp_path / 'shared' / 'run' / 'checkpoints'}",
            f"--data=bytes:{tmp_path / 'data'},seq_len=8",
            f"--json={tmp_path / 'report.json'}",
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    status = {line["check"]: line["status"] for line in report["findings"]}
    assert report["ok"] and len(report["workers"]) == 2
    assert all(status[name] == "ok" for name in ("workers", "versions", "devices", "collective", "ports", "clocks"))
    assert status["checkpoint_dir"] == status["data"] == "ok" and status["links"] in ("ok", "warning")
    assert sorted((one["source"], one["target"]) for one in report["links"]) == [(0, 1), (1, 0)]
    assert all(one["mb_per_s"] > 1 and one["latency_ms"] > 0 for one in report["links"])
    assert "1 file(s), 3000 bytes, the same on all workers" in found.stdout
    assert list((tmp_path / "shared").iterdir()) == []  # nothing is left, the folders neither


def test_three_workers_of_a_job_with_planted_faults(tmp_path):
    """Worker 1 has other data, worker 2 another folder and another NumPy; all three end with exit code 1."""
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.bin").write_bytes(name[:1].encode() * (3 << 20))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    info = tmp_path / "packages" / "numpy-1.2.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.2.3\n")
    first = {"PYTHONPATH": os.pathsep.join((str(info.parent), os.environ["PYTHONPATH"]))}
    where = addresses(3)
    report = tmp_path / "report.json"
    workers = [
        start(
            where,
            index,
            f"--data={tmp_path / data}/*.bin",
            f"--checkpoint_dir={tmp_path / folder}",
            f"--json={report}",
            variables=first if index == 2 else {},
        )
        for index, (data, folder) in enumerate([("good", "one"), ("bad", "one"), ("good", "two")])
    ]
    (code, shown), *others = finish(workers)
    assert code == 1 and others == [(1, ""), (1, "")]  # worker 0 speaks for all
    found = {line["check"]: line for line in json.loads(report.read_text())["findings"]}
    failed = {name for name, line in found.items() if line["status"] == "failed"}
    assert failed == {"versions", "checkpoint_dir", "data"}
    there = version("numpy")
    assert found["versions"]["found"] == f"numpy differs (workers 0, 1: {there}; worker 2: 1.2.3)"
    assert found["data"]["found"] == "the content is not the same on workers 0 and 1 of x.bin"
    said = found["checkpoint_dir"]["found"]
    assert "worker 0 does not see the file of worker 2; worker 1 does not see the file of worker 2" in said
    assert "worker 2 does not see the file of workers 0, 1" in said
    assert "data (failed): Copy the data anew" in shown and "3 of 14 checks failed" in shown
    assert list((tmp_path / "one").iterdir()) == list((tmp_path / "two").iterdir()) == []


def test_a_worker_that_does_not_come_up_is_named_and_the_others_are_checked():
    where = addresses(3)
    clusters = [Cluster(where, index, "test") for index in (0, 2)]
    for report in together(clusters, 2 * [Options(timeout_s=3.0)]):
        found = results(report)
        assert found["workers"] == (Status.FAILED, f"worker 1 ({where[1]}) did not come up within 3 s")
        assert found["ports"][0] is Status.OK and found["clocks"][0] is Status.OK and report.failed


def test_worker_0_that_does_not_come_up_is_named():
    where = addresses(2)
    report = examine(Cluster(where, 1, "test"), Options(timeout_s=1.0), lambda _: None)
    assert report.author == 1
    ((status, said),) = results(report).values()
    assert status is Status.FAILED and said.startswith(f"worker 0 ({where[0]}) did not come up within 1 s")
    assert "Connection refused" in said


def test_a_worker_that_goes_away_is_named_and_the_others_are_checked():
    where = addresses(3)

    def leave() -> None:
        with joined(Cluster(where, 1, "test")) as channel:
            channel.receive(50.0)  # the first question

    thread = threading.Thread(target=leave)
    thread.start()
    reports = together([Cluster(where, index, "test") for index in (0, 2)], 2 * [Options(timeout_s=10.0)])
    thread.join()
    status, said = results(reports[0])["workers"]
    assert status is Status.FAILED and reports[0] == reports[1]
    assert said.startswith(f"worker 1 ({where[1]}) ") and said.endswith("(asked for 'facts')")
    assert results(reports[0])["links"][0] is not Status.FAILED


def test_a_stranger_holds_nobody_up():
    where = addresses(2)
    host, port = where[0].split(":")

    def disturb() -> None:
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port)), timeout=1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    stranger.recv(10)
                return
            except OSError:
                threading.Event().wait(0.05)

    thread = threading.Thread(target=disturb)
    thread.start()
    reports = together([Cluster(where, index, "test") for index in (0, 1)], 2 * [Options(timeout_s=10.0)])
    thread.join()
    assert not reports[0].failed


def test_workers_with_different_lists():
    where = addresses(3)
    clusters = [Cluster(where[:2], 0, "test"), Cluster((where[0], where[2]), 1, "test")]
    ours, theirs = together(clusters, 2 * [Options(timeout_s=5.0)])
    for report in (ours, theirs):
        status, said = results(report)["workers"]
        assert status is Status.FAILED and "have different lists of workers" in said
        assert "come up" not in said


def test_a_folder_that_cannot_be_written_and_missing_data(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "shared").mkdir()
    there, nowhere = str(tmp_path / "shared"), str(tmp_path / "file" / "below")
    report = job([Options(there, str(tmp_path)), Options(nowhere, str(tmp_path / "none"))])
    found = results(report)
    assert found["checkpoint_dir"][0] is Status.FAILED
    assert found["checkpoint_dir"][1] == f"worker 1: {nowhere} cannot be written: Not a directory"
    assert found["data"] == (Status.FAILED, f"worker 1: --data={tmp_path / 'none'} names no file here")
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_one_worker_and_a_folder_that_cannot_exist(tmp_path):
    found = results(examine(Cluster.local(), Options("/proc/x"), lambda _: None))
    assert found["workers"] == (Status.OK, "no cluster in the environment: one worker")
    assert found["disk"] == (Status.SKIPPED, "there is no disk at /proc/x that tells of its space")
    status, said = found["checkpoint_dir"]
    assert status is Status.FAILED and said.startswith("worker 0: /proc/x cannot be made: ")
    where = addresses(1)
    found = results(examine(Cluster(where, 0, "TF_CONFIG"), Options(str(tmp_path)), lambda _: None))
    assert found["workers"] == (Status.OK, "one worker (TF_CONFIG)")
    assert found["disk"][0] is not Status.SKIPPED and found["checkpoint_dir"][0] is Status.OK


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (
            "bogus:{0}/none",
            "--data=bogus:{0}/none names no file here, and bogus: is no prefix of data (there are bytes:",
        ),
        ("byte:file", "the module byte is not found here, installed or in {1}, and byte: is no prefix of data (there"),
        ("bytes:{0}/none", "--data=bytes:{0}/none names no file here"),
        ("no_such.module:load", "the module no_such.module is not found here, installed or in {1}"),
    ],
)
def test_data_with_an_unknown_prefix(spec, error, tmp_path):
    said, wanted = contents(spec.format(tmp_path)).error, error.format(tmp_path, os.getcwd())
    assert said.startswith(wanted) if "prefix" in wanted else said == wanted


def test_a_worker_that_was_told_something_else(tmp_path):
    found = results(job([Options(str(tmp_path), "digits"), Options()]))
    assert found["checkpoint_dir"] == (Status.FAILED, "worker 1 was given no --checkpoint_dir")
    assert found["data"] == (Status.FAILED, "worker 1 was given no --data")


def test_what_a_worker_left_behind_is_swept(tmp_path):
    for index in (0, 1):
        Marks(str(tmp_path / "new"), index, "abc").write(make_folder=True)
    (tmp_path / "new" / ".tfdist-doctor-other-1").touch()
    own = Marks(str(tmp_path / "new"), 0, "abc")
    assert own.seen() == [0, 1]
    own.sweep()
    assert own.seen() == [1]
    own.sweep(everyone=True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".tfdist-doctor-other-1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_doctor_that_is_ended_leaves_nothing_behind(number, tmp_path):
    """Worker 0 has left its file, made the folder, and waits for worker 1, which does not answer."""
    where = addresses(2)
    worker = start(where, 0, f"--checkpoint_dir={tmp_path / 'run'}")
    cluster, here = Cluster(where, 1, "test"), threading.Event()

    def hang() -> None:
        with Server(cluster, 8), joined(cluster) as channel:
            other = Worker(cluster, Options(str(tmp_path / "run")))
            while (request := channel.receive(100.0))["op"] != "mark":
                channel.send(other.answer(request), 10.0)
            here.set()
            with pytest.raises(PeerError, match="went away"):
                channel.receive(100.0)

    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(hang)
        assert here.wait(100)
        assert [path.name[:15] for path in (tmp_path / "run").iterdir()] == [".tfdist-doctor-"]
        worker.send_signal(number)
        ((code, _),) = finish([worker])
        hanging.result(timeout=30)
    assert code == 128 + number and list(tmp_path.iterdir()) == []


def _of_this_test(mark: str) -> list[bytes]:
    """Returns the commands of the processes that have `mark` in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append(environ.with_name("cmdline").read_bytes())
        except OSError:
            continue  # it has just ended, or is somebody else's
    return found


def _when_marked(folder: Path, doctor: subprocess.Popen) -> None:
    """Waits for the workers' files, and takes that of worker 1 away: the workers look for it for some seconds."""
    deadline = time.monotonic() + 100
    while not (left := list(folder.glob(".tfdist-doctor-*-1"))):
        assert doctor.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    left[0].unlink()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("numbers", "to_all"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGINT], True),  # as Ctrl-C in a terminal
        ([signal.SIGHUP], False),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGTERM], False),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGHUP", "several"],
)
def test_a_doctor_that_is_ended_takes_its_workers_along(numbers, to_all, tmp_path):
    (tmp_path / "tmp").mkdir()
    mark = f"TFDIST_TEST={tmp_path}"
    doctor = subprocess.Popen(
        [*_COMMAND, "--workers=2", f"--checkpoint_dir={tmp_path / 'run'}"],
        env={**os.environ, "TFDIST_TEST": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # As a terminal starts it: this suite itself may run under nohup, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        text=True,
    )
    try:
        _when_marked(tmp_path / "run", doctor)
        assert list((tmp_path / "tmp").iterdir()) and len(_of_this_test(mark)) >= 4
        for number in numbers:
            (os.killpg if to_all else os.kill)(doctor.pid, number)
            time.sleep(0.1)
        out, _ = doctor.communicate(timeout=60)
    finally:
        if doctor.poll() is None:
            doctor.kill()
    assert doctor.returncode == 128 + numbers[0] and "Traceback" not in out, out
    assert _of_this_test(mark) == []
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"] and list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "kind", "names"),
    [
        ("digits", "digits", ["digits.csv.gz"]),
        ("synthetic:examples=8", "synthetic", ["synthetic:examples=8"]),
        ("bytes:{0}/d,seq_len=4", "files", ["a.txt", "sub/b.txt"]),
        ("bytes:{0}/d/a.txt", "files", ["a.txt"]),
        ("tfrecord:{0}/d/*.txt", "files", ["a.txt"]),
        ("{0}/d/**", "files", ["a.txt", "sub/b.txt"]),
        ("{0}/d", "files", ["a.txt", "sub/b.txt"]),
        ("{0}/*", "files", ["d/a.txt", "d/sub/b.txt"]),
        ("tfdist.data:load", "function", ["tfdist.data"]),
    ],
)
def test_data_by_each_kind_of_name(spec, kind, names, tmp_path):
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(name)
    there = contents(spec.format(tmp_path))
    assert (there.error, there.kind, [name for name, _, _ in there.files]) == ("", kind, names)


def test_data_that_differs_in_one_byte_at_an_end_in_size_or_in_names(tmp_path):
    def made(name: str, content: bytes) -> Contents:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(content)
        return contents(str(tmp_path / name))

    long = bytes(5 << 20)
    good = made("good", long)
    specs = {0: "a", 1: "b"}
    assert check_data(specs, {0: good, 1: made("same", long)}).status is Status.OK
    for name, content in {"first": b"\1" + long[1:], "last": long[1:] + b"\1"}.items():
        finding = check_data(specs, {0: good, 1: made(name, content)})
        assert finding.found == "the content is not the same on workers 0 and 1 of x"
    finding = check_data(specs, {0: good, 1: made("short", long[1:])})
    assert finding.found == f"x has {5 << 20} bytes on worker 0 and {(5 << 20) - 1} on worker 1"
    (tmp_path / "same" / "y").touch()
    finding = check_data(specs, {0: good, 1: contents(str(tmp_path / "same"))})
    assert finding.status is Status.FAILED and finding.found == "worker 0 lacks y"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--timeout=0"], "--timeout=0.0: a number of at least 1 is needed"),
        (["--timeout=nan"], "--timeout=nan"),
        (["--timeout=soon"], "invalid float value: 'soon'"),
        (["--workers=0"], "--workers=0: a number of at least 1 is needed"),
        (["--json=/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--checkpoint_dir="], "--checkpoint_dir=: give a folder"),
        (["--checkpoint_dir=gs://bucket/run"], "--checkpoint_dir=gs://bucket/run: give a folder"),
        (["--data=s3://bucket/x"], "only files that the machines have mounted"),
        (["--data=digits:3"], "--data=digits:3: give digits, bytes:PATH"),
        (["--data=bytes:"], "--data=bytes:: give digits, bytes:PATH"),
        (
            ["--data=bogus:"],
            "--data=bogus: begins with no prefix of data (there are bytes:, tfrecord: and synthetic:); give",
        ),
        (["--data=byte:"], "did you mean 'bytes'?"),
        (["--dat=digits"], "unrecognized arguments: --dat=digits"),
        (["more"], "unrecognized arguments: more"),
    ],
    ids=str,
)
def test_wrong_use_is_exit_code_2(arguments, words, capsys):
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err


def test_a_worker_of_a_job_does_not_start_others(monkeypatch, capsys):
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert main(["doctor", "--workers=2"]) == 2
    assert "--workers=2: this process is one of the 2 workers of a job already (TF_CONFIG)" in capsys.readouterr().err


def test_a_port_in_use_is_exit_code_2(monkeypatch, capsys):
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        where = [f"{HOST}:{other.getsockname()[1]}", *addresses(1)]
        config = {"cluster": {"worker": where}, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        assert main(["doctor"]) == 2
    assert "is in use on this machine" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpiexec"), reason="needs an mpiexec")
def test_a_job_of_mpiexec(tmp_path):
    command = ["mpiexec", "-n", "2", *_COMMAND, f"--checkpoint_dir={tmp_path / 'run'}", f"--data={tmp_path / 'none'}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert found.returncode == 1 and "all 2 came up (MPI)" in found.stdout, found.stdout + found.stderr
    assert "1 of 14 checks failed" in found.stdout and found.stdout.count("checks failed") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not can_be_made(), reason="links take root and iproute2")
@pytest.mark.parametrize("blocked", [False, True])
def test_a_link_of_known_speed_and_a_port_blocked_in_one_direction(blocked, tmp_path):
    with link("100mbit") as ends:
        where = tuple(f"{host}:{23456 + index}" for index, host in enumerate(ends.hosts))
        if blocked:  # worker 0 cannot connect to worker 1; worker 1 can connect to worker 0
            rules = ["add pref 100 lookup local", "del pref 0", "add pref 50 ipproto tcp dport 23457 prohibit"]
            for rule in rules:
                subprocess.run([*ends.prefixes[0], "ip", "rule", *rule.split()], check=True)
        report = tmp_path / "report.json"
        workers = [start(where, i, f"--json={report}", prefix=ends.prefixes[i]) for i in range(2)]
        codes = [code for code, _ in finish(workers)]
    data = json.loads(report.read_text())
    found = {line["check"]: line for line in data["findings"]}
    speeds = {(one["source"], one["target"]): one["mb_per_s"] for one in data["links"]}
    assert found["workers"]["status"] == "ok" and all(9 < speed < 15 for speed in speeds.values()), speeds
    if blocked:
        assert codes == [1, 1] and list(speeds) == [(1, 0)]
        assert found["ports"]["status"] == "failed"
        assert found["ports"]["found"].startswith(f"worker 0 to worker 1 ({where[1]}): ")
    else:
        assert codes == [0, 0] and len(speeds) == 2 and found["ports"]["status"] == "ok"


def test_the_folder_s_path_is_taken_as_it_is(tmp_path, monkeypatch):
    """A relative folder, and one with signs that a glob would read."""
    monkeypatch.chdir(tmp_path)
    for name in ("here", "[a]*"):
        Path(name).mkdir()
        found = results(job([Options(name), Options(name)]))
        assert found["checkpoint_dir"][0] is Status.OK
        assert list(Path(name).iterdir()) == []
