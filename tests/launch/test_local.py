"""launch(): what workers are given, what comes out, which failure is reported, what is returned."""

import io
import json
import os
import re
import socket

import pytest

from tfdist.errors import UsageError
from tfdist.launch import launch

pytestmark = pytest.mark.timeout(40)


def _launch(workers: int, script: str, *args: str, **options: object) -> tuple[int, str]:
    output = io.BytesIO()
    code = launch(workers, [script, *args], stdout=output, **options)
    return code, output.getvalue().decode()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not let a process choose its cores")
def test_workers_are_pinned_to_cores_of_their_own(script):
    path = script("print('cores', sorted(os.sched_getaffinity(0)))\n")
    cores = sorted(os.sched_getaffinity(0))
    code, text = _launch(3, path, pin=1)
    found = dict(re.findall(r"^\[worker (\d)\] cores (.*)$", text, re.MULTILINE))
    assert code == 0 and found == {str(i): str([cores[i % len(cores)]]) for i in range(3)}
    for wrong in (0, -1, 10_000, True, 1.0):
        with pytest.raises(UsageError, match=r"--pin\): a number of cores from 1 to"):
            _launch(1, path, pin=wrong)


def test_each_worker_has_its_prefix_its_cluster_and_the_arguments(script):
    path = script(
        "print('out', json.dumps([os.environ['TF_CONFIG'], sys.argv[1:], os.environ['EXTRA'], "
        "sys.stdin.read()]))\nprint('err', os.getpgid(0) == os.getpid(), file=sys.stderr)\n"
    )
    code, text = _launch(3, path, "--workers=7", "--", "-h", env={"EXTRA": "x"})
    assert code == 0
    found = dict(re.findall(r"^\[worker (\d)\] out (.*)$", text, re.MULTILINE))
    assert sorted(found) == ["0", "1", "2"]
    lists = set()
    for index, line in found.items():
        config, args, extra, stdin = json.loads(line)
        assert (args, extra, stdin) == (["--workers=7", "--", "-h"], "x", "")
        assert json.loads(config)["task"] == {"type": "worker", "index": int(index)}
        lists.add(tuple(json.loads(config)["cluster"]["worker"]))
        assert f"[worker {index}] err True" in text
    (workers,) = lists
    assert len(set(workers)) == 3 and all(worker.startswith("127.0.0.1:") for worker in workers)


def test_ports_are_free_for_the_workers_to_take(script):
    path = script(
        "import socket\n"
        "host, port = json.loads(os.environ['TF_CONFIG'])['cluster']['worker'][index].split(':')\n"
        "server = socket.create_server((host, int(port)))\n"
        "print('took', port)\n"
    )
    code, text = _launch(2, path)
    assert code == 0 and text.count("took") == 2


def test_start_port_is_taken_or_refused(script):
    path = script("print(json.loads(os.environ['TF_CONFIG'])['cluster']['worker'])")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"start_port={port - 1}: port {port} cannot be used"):
            _launch(2, path, start_port=port - 1)
    code, text = _launch(1, path, start_port=port)
    assert code == 0 and f"127.0.0.1:{port}" in text


def test_output_without_a_last_newline_and_any_bytes_come_out(script):
    path = script("sys.stdout.buffer.write(bytes(range(128, 256)) + b'\\0end')")
    output = io.BytesIO()
    assert launch(1, [path], stdout=output) == 0
    assert output.getvalue() == b"[worker 0] " + bytes(range(128, 256)) + b"\0end\n"


def test_lines_of_workers_do_not_mix(script):
    path = script("for number in range(3000): print(f'{index}:{number}:' + 'x' * 100)")
    code, text = _launch(3, path)
    assert code == 0
    for index in range(3):
        lines = [line for line in text.splitlines() if line.startswith(f"[worker {index}] ")]
        assert lines == [f"[worker {index}] {index}:{number}:" + "x" * 100 for number in range(3000)]


@pytest.mark.parametrize(("worker_code", "code"), [(0, 0), (1, 1), (2, 2), (3, 1), (255, 1)])
def test_exit_codes(worker_code, code, script):
    got, _ = _launch(2, script(f"sys.exit({worker_code} if index == 1 else 0)"))
    assert got == code


def test_a_worker_that_is_done_early_leaves_the_others_alone(script):
    path = script("if index == 0: wait_for('late'); print('went on')\nelse: write('late')\n")
    code, text = _launch(2, path)
    assert code == 0 and "[worker 0] went on" in text


def test_the_failing_worker_ends_the_others_and_its_error_comes_last(script):
    path = script(
        "if index == 1:\n"
        "    wait_for('waiting')\n"
        "    raise RuntimeError('boom')\n"
        "write('waiting')\n"
        "print('waits')\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('terminated'), sys.exit(7)))\n"
        "time.sleep(60)\n"
    )
    code, text = _launch(2, path)
    assert code == 1
    assert "[worker 0] waits" in text and "[worker 0] terminated" in text
    report = text[text.index("tfdist launch: worker 1 failed first, with exit code 1") :].splitlines()
    assert all(line.startswith("[worker 1] ") for line in report[1:])
    assert "Traceback" in report[1] and report[-1] == "[worker 1] RuntimeError: boom"


def test_no_more_than_the_last_lines_are_repeated(script):
    code, text = _launch(1, script("for number in range(100): print('line', number)\nsys.exit(2)"))
    report = text[text.index("failed first") :].splitlines()[1:]
    assert code == 2
    assert report == [f"[worker 0] line {number}" for number in range(60, 100)]


def test_a_worker_killed_by_a_signal_is_named_with_it(script):
    code, text = _launch(2, script("os.kill(os.getpid(), signal.SIGSEGV) if index == 0 else time.sleep(60)"))
    assert code == 1 and "worker 0 failed first, ended by SIGSEGV" in text


def test_a_lost_connection_is_not_the_cause_when_its_cause_follows(script):
    # Worker 1 takes its time to end, until worker 0 is gone for certain.
    path = script(
        "def gone(pid):\n"
        "    try: return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] == 'Z'\n"
        "    except OSError: return True\n"
        "if index == 0:\n"
        "    print('errors_impl.UnavailableError: Connection reset by peer')\n"
        "    write('pid', str(os.getpid()))\n"
        "    sys.exit(1)\n"
        "wait_for('pid')\n"
        "while not gone(int((folder / 'pid').read_text())): time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "print('ValueError: mine')\n"
        "sys.exit(2)\n"
    )
    code, text = _launch(2, path)
    assert code == 2
    assert "worker 1 failed first, with exit code 2" in text and text.endswith("[worker 1] ValueError: mine\n")


def test_a_lost_connection_alone_is_reported_after_a_moment(script):
    code, text = _launch(2, script("sys.exit('UnavailableError') if index == 0 else time.sleep(60)"))
    assert code == 1 and text.endswith("[worker 0] UnavailableError\n")


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(script):
    path = script(
        "if index == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    write('pid', str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "wait_for('pid')\n"
        "sys.exit(2)\n"
    )
    code, text = _launch(2, path)
    assert code == 2 and "worker 1 failed first" in text


def test_logs_hold_all_output_and_are_never_written_over(script, tmp_path):
    path = script("print('one\\r\\x08two', sys.argv[1], index); print('err', file=sys.stderr)")
    logs = tmp_path / "new" / "logs"
    code, text = _launch(2, path, "first", log_dir=logs)
    assert code == 0 and f"full output in {logs / 'worker-0.log'} to worker-1.log" in text
    assert (logs / "worker-1.log").read_bytes() == b"one\r\x08two first 1\nerr\n"
    (logs / "worker-0.1.log").write_text("mine")
    code, text = _launch(2, path, "second", log_dir=logs)
    assert code == 0 and str(logs / "worker-0.2.log") in text
    assert b"first 1" in (logs / "worker-1.log").read_bytes()
    assert b"second 1" in (logs / "worker-1.2.log").read_bytes()
    assert (logs / "worker-0.1.log").read_text() == "mine"


def test_the_report_names_the_log(script, tmp_path):
    code, text = _launch(2, script("sys.exit(index)"), log_dir=tmp_path)
    assert code == 1 and f"all of it: {tmp_path / 'worker-1.log'}" in text


def test_refuses_what_cannot_be_right_before_it_starts_anything(script, tmp_path):
    path = script("write('started')")
    (tmp_path / "file").write_text("")
    for workers in 0, -1, True, "2":
        with pytest.raises(UsageError, match="workers="):
            launch(workers, [path])
    for command, said in [([], "has to be a list"), (path, "has to be a list")]:
        with pytest.raises(UsageError, match=said):
            launch(1, command)
    with pytest.raises(UsageError, match="'nothing.py' does not exist"):
        launch(1, ["nothing.py"])
    with pytest.raises(UsageError, match="is a folder"):
        launch(1, [str(tmp_path)])
    with pytest.raises(UsageError, match="log_dir="):
        launch(1, [path], log_dir=tmp_path / "file")
    for port in 0, 65536, "80":
        with pytest.raises(UsageError, match="start_port="):
            launch(1, [path], start_port=port)
    assert not (tmp_path / "started").exists()
