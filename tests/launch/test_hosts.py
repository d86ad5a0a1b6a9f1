"""`tfdist launch --hosts`: workers that agents run, through a real sshd, and through a shell that stays here."""

import getpass
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.running import RunningJob
from tfdist.launch.agent import Lines
from tfdist.launch.agent_wire import PROTOCOL, Hello, Order
from tfdist.launch.hosts import Hosts, travelling

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).resolve().parents[2]
SSHD = Path("/usr/sbin/sshd")
_WAITS = "write(f'pid-{index}', str(os.getpid()))\nprint('up')\ntime.sleep(100)\n"


@pytest.fixture
def shell(tmp_path: Path) -> str:
    """A remote shell that runs the command on this machine, whatever the host."""
    path = tmp_path / "rsh"
    path.write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n')
    path.chmod(0o755)
    return f"--rsh={path}"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[tuple[int, str]]":
    """Runs an sshd with keys of its own; gives its process and the option of the ssh that reaches it."""
    if not SSHD.exists() or shutil.which("ssh") is None:
        pytest.skip("openssh-server is not installed")
    if os.geteuid() != 0 and not Path("/run/sshd").is_dir():
        pytest.skip("sshd needs the folder /run/sshd, which only root can make")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PasswordAuthentication no\nListenAddress 127.0.0.1\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with open(folder / "log", "wb") as log:
        command = [SSHD, "-D", "-e", "-f", folder / "config", "-p", str(port)]
        server = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]})
    options = "BatchMode=yes ConnectTimeout=10 StrictHostKeyChecking=no IdentitiesOnly=yes LogLevel=ERROR".split()
    ssh = ["ssh", "-F", "/dev/null", "-i", folder / "user", "-p", port, "-o", "UserKnownHostsFile=/dev/null"]
    ssh += [word for option in options for word in ("-o", option)]
    try:
        deadline = time.monotonic() + 20
        while b"listening" not in (folder / "log").read_bytes():
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        yield server.pid, f"--rsh={shlex.join(map(str, ssh))}"
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture
def up(start, wait_until, tmp_path) -> "Callable[..., tuple[subprocess.Popen, list[int]]]":
    """Starts a launcher; gives it and the processes of its two workers, once they run."""

    def run(*args: str) -> tuple[subprocess.Popen, list[int]]:
        launcher = start(*args)
        files = [tmp_path / "pid-0", tmp_path / "pid-1"]
        try:
            wait_until(lambda: all(file.exists() for file in files) or launcher.poll() is not None)
        finally:
            if launcher.poll() is not None:
                print(launcher.stdout.read().decode())
        return launcher, [int(file.read_text()) for file in files]

    return run


def _run(*args: str, cwd: "Path | None" = None, **env: str) -> "tuple[int, str]":
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.cli", "launch", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace")


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _shells(launcher: int, host: str) -> list[int]:
    """Returns the remote shells of a launcher that lead to a host."""
    words = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in _children(launcher)}
    return [pid for pid, said in words.items() if said[0] == b"ssh" and host.encode() in said]


# Through sshd.


def test_workers_on_hosts_get_their_cluster_their_folder_and_no_secrets(sshd, script, tmp_path):
    path = script(
        "print('env', json.dumps([json.loads(os.environ['TF_CONFIG']), os.getcwd(), sys.argv[1:], sys.stdin.read(), "
        "{name: os.environ.get(name) for name in ['SECRET', 'NCCL_DEBUG', 'MINE', 'BARE']}]))\n"
        "print('err', file=sys.stderr)\n"
    )
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    options = (sshd[1], "--env=MINE=a'b $c", "--env", "BARE")
    code, text = _run(
        "--hosts=127.0.0.1,localhost", *options, path, "-x", cwd=folder, SECRET="s", NCCL_DEBUG="INFO", BARE="é"
    )
    assert code == 0, text
    found = [json.loads(re.search(rf"^\[worker {index}\] env (.*)$", text, re.M)[1]) for index in range(2)]
    for index, (config, cwd, args, stdin, env) in enumerate(found):
        hosts = [address.rpartition(":")[0] for address in config["cluster"]["worker"]]
        assert hosts == ["127.0.0.1", "localhost"] and config["task"]["index"] == index
        assert (cwd, args, stdin) == (str(folder), ["-x"], "")
        assert env == {"SECRET": None, "NCCL_DEBUG": "INFO", "MINE": "a'b $c", "BARE": "é"}
        assert f"[worker {index}] err" in text
    assert len(text.splitlines()) == 4, text


def test_a_killed_worker_is_seen_at_once_and_named(sshd, script, up, remaining, wait_until):
    launcher, pids = up("--hosts=127.0.0.1,localhost", sshd[1], script(_WAITS))
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    seen = b""
    while b"failed first" not in seen:
        seen = launcher.stdout.readline()
        assert seen
    assert time.monotonic() - began < 1  # in it the other worker has got SIGTERM and has ended
    assert b"worker 1 failed first, ended by SIGKILL (is the memory full?), on localhost" in seen
    launcher.communicate(timeout=20)
    assert launcher.returncode == 1 and remaining() == []
    wait_until(lambda: not _children(sshd[0]))


def test_kill_9_of_the_launcher_leaves_nothing_on_the_hosts(sshd, script, up, alive, remaining, wait_until):
    body = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n" + _WAITS
    launcher, pids = up("--hosts=127.0.0.1,localhost", sshd[1], script(body))
    assert len(_children(sshd[0])) == 2 and len(remaining()) >= 4
    launcher.kill()
    wait_until(lambda: not any(map(alive, pids)) and not remaining() and not _children(sshd[0]))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_signals_are_passed_on(number, code, sshd, script, up, remaining, wait_until):
    body = (
        "def leave(number, _):\n    print('got', number)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, leave)\nsignal.signal(signal.SIGTERM, leave)\n"
    )
    launcher, _ = up("--hosts=127.0.0.1,localhost", sshd[1], script(body + _WAITS))
    launcher.send_signal(number)
    text = launcher.communicate(timeout=20)[0].decode()
    assert launcher.returncode == code and remaining() == []
    assert all(f"[worker {index}] got {int(number)}" in text for index in range(2))
    wait_until(lambda: not _children(sshd[0]))


@pytest.mark.parametrize(("worker_code", "code"), [(2, 2), (3, 1)])
def test_exit_codes_come_through_ssh(worker_code, code, sshd, script):
    got, text = _run("--hosts=127.0.0.1,localhost", sshd[1], script(f"sys.exit({worker_code} if index == 1 else 0)"))
    assert got == code and f"worker 1 failed first, with exit code {worker_code}, on localhost" in text


def test_a_broken_connection_is_named_with_what_ssh_says(sshd, script, up, remaining, wait_until):
    launcher, _ = up("--hosts=127.0.0.1,localhost", sshd[1], script(_WAITS))
    (shell,) = _shells(launcher.pid, "localhost")
    os.kill(shell, signal.SIGTERM)
    text = launcher.communicate(timeout=20)[0].decode()
    assert launcher.returncode == 1
    assert "worker 1 failed first" in text and "the connection to host localhost has ended: ssh " in text
    wait_until(lambda: not remaining() and not _children(sshd[0]))


def test_a_host_that_does_not_answer_any_more_holds_nobody_up(sshd, script, up, remaining, wait_until):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _WAITS
    launcher, pids = up("--hosts=127.0.0.1,localhost", sshd[1], script(body))
    (shell,) = _shells(launcher.pid, "localhost")
    os.kill(shell, signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    text = launcher.communicate(timeout=30)[0].decode()
    assert launcher.returncode == 1 and "worker 0 failed first" in text
    assert "[worker 1] tfdist launch: host localhost does not answer; what runs there ends by itself" in text
    wait_until(lambda: not remaining() and not _children(sshd[0]))


def test_what_ssh_says_of_a_host_that_refuses_is_told(sshd, script):
    code, text = _run("--hosts=127.0.0.1,nobody-of-this-name@localhost", sshd[1], script(""))
    assert code == 1 and len(text.splitlines()) == 1
    assert "error: host nobody-of-this-name@localhost (worker 1) could not be used: ssh " in text
    assert "Permission denied" in text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_training_on_hosts_survives_the_loss_of_a_worker(sshd, tmp_path):
    flags = ["--strategy=multi_worker", "--model=mlp", "--data=digits", "--steps=200", "--checkpoint_every=5"]
    flags += [f"--checkpoint_dir={tmp_path / 'ck'}", f"--summary_json={tmp_path / 'summary.json'}", "--seed=3"]
    launch = [
        f"--hosts=127.0.0.1,{getpass.getuser()}@localhost",
        sshd[1],
        "--max_restarts=1",
        "--env=CUDA_VISIBLE_DEVICES",
    ]
    job = RunningJob(tmp_path / "job", flags, launch)
    try:
        job.until(lambda: len(list((tmp_path / "ck").glob("*"))) > 1, timeout_s=100)
        (worker,) = [
            int(file.parent.name)
            for file in Path("/proc").glob("[0-9]*/environ")
            if _is_worker(file, f"TFDIST_TEST={job.folder}", 1)
        ]
        os.kill(worker, signal.SIGKILL)
        assert job.wait(150) == 0, job.printed()
    finally:
        job.end()
    (failure,) = job.events("failure")
    assert failure["worker"] == 1 and failure["code"] == -signal.SIGKILL and failure["host"].endswith("@localhost")
    assert json.loads((tmp_path / "summary.json").read_text())["num_workers"] == 2
    job.assert_nothing_is_left(tmp_path / "ck")


def _is_worker(environ: Path, mark: str, index: int) -> bool:
    try:
        lines = environ.read_bytes().split(b"\0")
    except OSError:
        return False
    configs = [json.loads(line[10:]) for line in lines if line.startswith(b"TF_CONFIG=")]
    return mark.encode() in lines and any(config["task"]["index"] == index for config in configs)


# Through a shell on this machine.


def test_indices_follow_the_hosts_and_ports_are_free(shell, script):
    path = script(
        "import socket\n"
        "name, _, port = json.loads(os.environ['TF_CONFIG'])['cluster']['worker'][index].rpartition(':')\n"
        "socket.create_server(('127.0.0.1', int(port)))\n"
        "print('took', name)\n"
    )
    code, text = _run("--hosts=127.0.0.1:2,me@localhost,127.0.0.2:1", "--workers=4", shell, path)
    names = ["127.0.0.1", "127.0.0.1", "localhost", "127.0.0.2"]
    assert code == 0, text
    assert sorted(text.splitlines()) == [f"[worker {index}] took {name}" for index, name in enumerate(names)]


def test_output_comes_out_unchanged_and_in_the_logs(shell, script, tmp_path):
    path = script(
        "if index: sys.exit()\n"
        "sys.stdout.buffer.write(bytes(range(256)) + b'\\n' + b'x' * 3_000_000)\nsys.stdout.flush()\n"
        "os.write(2, b'tfdist-agent {}\\ntfdist-agent-ended 7\\nend')\n"
    )
    code, text = _run("--hosts=127.0.0.1:2", shell, f"--log_dir={tmp_path / 'logs'}", path)
    expected = bytes(range(256)) + b"\n" + b"x" * 3_000_000 + b"tfdist-agent {}\ntfdist-agent-ended 7\nend"
    assert code == 0 and (tmp_path / "logs" / "worker-0.log").read_bytes() == expected


def test_what_a_login_script_prints_is_left_out(tmp_path, script):
    path = tmp_path / "rsh"
    path.write_text('#!/bin/sh\nprintf "Welcome to\\n$1"\necho "be careful" >&2\nshift\nexec sh -c "$1"\n')
    path.chmod(0o755)
    code, text = _run("--hosts=127.0.0.1", f"--rsh={path}", script("print('worker')"))
    assert (code, text) == (0, "[worker 0] worker\n")


def test_children_of_a_worker_end_with_it_also_where_one_has_left_its_group(shell, script, alive, tmp_path):
    path = script(
        "program = [sys.executable, '-c', 'import time; time.sleep(30)']\n"
        "write('child', str(subprocess.Popen(program).pid))\n"
        "write('left', str(subprocess.Popen(program, start_new_session=True).pid))\n"
    )
    began = time.monotonic()
    code, text = _run("--hosts=127.0.0.1", shell, path)
    child, left = (int((tmp_path / name).read_text()) for name in ("child", "left"))
    try:
        assert code == 0 and not alive(child), text
        assert alive(left) and time.monotonic() - began < 15  # nobody waits for it
    finally:
        os.kill(left, signal.SIGKILL)


def test_a_job_is_started_again_with_new_agents(shell, script, tmp_path):
    path = script(
        "print('attempt', os.environ['TFDIST_RESTARTS'], os.getppid())\n"
        "sys.exit(1 if index == 1 and os.environ['TFDIST_RESTARTS'] == '0' else 0)\n"
    )
    code, text = _run("--hosts=127.0.0.1,localhost", shell, "--max_restarts=1", path)
    agents = re.findall(r"^\[worker 1\] attempt (\d) (\d+)$", text, re.M)
    assert code == 0 and agents[0][0] == "0" and agents[-1][0] == "1" and agents[0][1] != agents[-1][1], text


def test_a_host_that_is_gone_when_the_job_is_started_again_costs_a_restart(tmp_path, script):
    path = tmp_path / "rsh"
    path.write_text(
        f'#!/bin/sh\n[ ! -e {tmp_path}/gone ] || {{ echo "no route"; exit 255; }}\nshift\nexec sh -c "$1"\n'
    )
    path.chmod(0o755)
    body = script("write('gone')\nsys.exit(1)\n")
    code, text = _run("--hosts=127.0.0.1", f"--rsh={path}", "--max_restarts=2", f"--log_dir={tmp_path / 'logs'}", body)
    assert code == 1 and text.count("could not be used") == 2 and "no route" in text
    events = [json.loads(line) for line in (tmp_path / "logs" / "events.jsonl").read_text().splitlines()]
    assert {event["host"] for event in events} == {"127.0.0.1"}
    assert [event["restarts"] for event in events] == [True, True, False]


def test_a_job_goes_on_without_a_host_that_is_gone(tmp_path, script):
    path = tmp_path / "rsh"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = 127.0.0.1 ] || [ ! -e {tmp_path}/gone ] || exit 255\nshift\nexec sh -c "$1"\n'
    )
    path.chmod(0o755)
    body = (
        "if len(json.loads(os.environ['TF_CONFIG'])['cluster']['worker']) == 3:\n"
        "    if index == 1: write('gone'); sys.exit(1)\n"
        "    time.sleep(60)\n"
        "print('place', os.environ['TFDIST_PLACE'])\n"
    )
    code, text = _run(
        "--hosts=127.0.0.1,localhost,127.0.0.1", f"--rsh={path}", "--max_restarts=3", "--min_workers=2", script(body)
    )
    assert code == 0 and "place 1 has failed twice in a row" in text, text
    assert "[worker 0] place 0" in text and "[worker 1] place 2" in text


def test_kill_9_of_an_agent_ends_its_worker(shell, script, up, alive, wait_until, remaining):
    launcher, pids = up("--hosts=127.0.0.1,localhost", shell, script(_WAITS))
    agent = int(Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    text = launcher.communicate(timeout=20)[0].decode()
    assert launcher.returncode == 1 and "worker 1 failed first" in text and "on localhost" in text
    wait_until(lambda: not any(map(alive, pids)) and not remaining())


def test_kill_9_of_the_launcher_s_group_leaves_nothing(shell, script, up, alive, wait_until, remaining):
    launcher, pids = up("--hosts=127.0.0.1,localhost", shell, script(_WAITS))
    os.killpg(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)) and not remaining())


def test_a_stopped_worker_prints_where_it_is(tmp_path):
    program = "import faulthandler, os, signal as s; faulthandler.register(s.SIGQUIT, chain=True); "
    program += "os.kill(os.getpid(), s.SIGSTOP)"
    agent = subprocess.Popen(
        [sys.executable, "-m", "tfdist.launch.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert agent.stdout.readline() == b"\n"
        hello = Hello.from_line(agent.stdout.readline().strip())
        assert hello.protocol == PROTOCOL and hello.python.split(".")[:2] == [str(n) for n in sys.version_info[:2]]
        with pytest.raises(OSError):
            socket.create_server(("127.0.0.1", hello.port)).close()  # the agent holds it
        agent.stdin.write(Order([sys.executable, "-c", program], {}, str(tmp_path)).to_line())
        agent.stdin.flush()
        time.sleep(1)
        agent.stdin.write(b"beat\nnonsense\nsignal x\ndump\n")
        agent.stdin.flush()
        out, said = agent.stdout.read(), agent.stderr.read()
        agent.wait(20)
    finally:
        agent.kill()
    assert b"most recent call first" in out and said.strip() == b"tfdist-agent-ended -3"
    assert agent.returncode == 128 + signal.SIGQUIT


def test_an_agent_waits_for_its_order_only_while_the_launcher_is_there():
    command = [sys.executable, "-m", "tfdist.launch.agent"]
    began = time.monotonic()
    done = subprocess.run(command, input=b"beat\n", capture_output=True, timeout=20, check=False)
    assert done.returncode == 1 and done.stderr == b"" and time.monotonic() - began < 10
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
    assert done.returncode == 1 and done.stdout.count(b"\n") == 2


def test_an_agent_that_hears_nothing_for_too_long_gives_up():
    read, write = os.pipe()
    try:
        os.write(write, b"beat\nsig")
        lines = Lines(read, lease_s=0.1)
        assert (lines.next(), lines.next()) == (b"beat\n", None)
    finally:
        os.close(read)
        os.close(write)


def test_an_agent_starts_without_tensorflow():
    program = "import sys, tfdist.launch.agent; sys.exit('tensorflow' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=20, check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--python=/no/python"], "could not be used: .*/no/python"),
        (["--python=sleep", "--start_timeout=5"], r"host [\w.]+ \(worker [01]\) could not be used"),
        (["--rsh=sh -c 'sleep 30'", "--start_timeout=0.5"], r"has not answered within 0.5 s \(--start_timeout\)"),
        (["--rsh=sh -c 'echo no tfdist here; exit 1'"], "ended with exit code 1; it printed: no tfdist here"),
        (["--rsh=false"], r"false [\w.]+ ended with exit code 1; it printed nothing"),
        (
            ['--rsh=echo \'tfdist-agent {"protocol": 99, "tfdist": "9.9", "python": "3.99", "port": 1}\'  #'],
            "",
        ),
    ],
)
def test_a_host_that_cannot_be_used_is_told_in_one_line(options, said, shell, script, remaining):
    options = options if options[0].startswith("--rsh") else [shell, *options]
    code, text = _run("--hosts=127.0.0.1,localhost", *options, script("write('started')"))
    assert code == 1 and len(text.splitlines()) == 1, text
    assert re.search(said, text), text
    assert remaining() == []


def test_another_version_on_a_host_is_refused(tmp_path, script):
    hello = Hello(PROTOCOL, "9.9", "3.11.1", 12345).to_line().decode()
    path = tmp_path / "rsh"
    path.write_text(f"#!/bin/sh\necho '{hello}'\nsleep 20\n")
    path.chmod(0o755)
    code, text = _run("--hosts=127.0.0.1", f"--rsh={path}", script("write('started')"))
    assert code == 1 and "has tfdist 9.9 (protocol 1), and this machine has" in text and "install the same" in text


def test_a_signal_while_hosts_do_not_answer_ends_the_job(start, script, wait_until):
    launcher = start("--hosts=127.0.0.1,localhost", "--rsh=sh -c 'sleep 100'", script(""))
    wait_until(lambda: len(_children(launcher.pid)) == 3)  # the watchdog and two shells
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 75


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hosts="], "an empty host"),
        (["--hosts=h1,,h2"], "hosts='h1,,h2' (--hosts): an empty host"),
        (["--hosts=-oProxyCommand=x"], "the host '-oProxyCommand=x'"),
        (["--hosts=h1:0"], "the host 'h1:0' is not of the form NAME or NAME:WORKERS"),
        (["--hosts=h1 h2"], "the host 'h1 h2'"),
        (["--hosts=localhost,h2"], "localhost means another machine on each host"),
        (["--hosts=h1:2,h2", "--workers=2"], "workers=2 (--workers): the hosts h1:2,h2 are for 3 worker(s)"),
        (["--hosts=h1", "--rsh=no-such-command -x"], "there is no command 'no-such-command' on PATH"),
        (["--hosts=h1", "--rsh='"], "No closing quotation"),
        (["--hosts=h1", "--rsh="], "(--rsh): a command is needed"),
        (["--hosts=h1", "--rsh=true", "--mpi"], "mpi (--mpi) is for workers on this machine only"),
        (["--hosts=h1", "--rsh=true", "--pin=1"], "pin (--pin) is for"),
        (["--hosts=h1", "--rsh=true", "--start_port=4000"], "start_port (--start_port) is for"),
        (["--hosts=h1", "--rsh=true", "--python="], "(--python)"),
        (["--hosts=h1", "--rsh=true", "--address=192.0.2.77"], "address='192.0.2.77' (--address): not an address of"),
        (["--hosts=h1", "--rsh=true", "--start_timeout=0"], "start_timeout=0.0 (--start_timeout)"),
        (["--workers=2", "--rsh=ssh"], "--rsh=ssh is for workers on other hosts"),
        (["--workers=1", "--env=TFDIST_NOT_SET"], "TFDIST_NOT_SET is not set here"),
        (["--workers=1", "--env==x"], "(--env): give NAME, or NAME=VALUE"),
    ],
)
def test_wrong_use_is_exit_code_2(options, said, script, tmp_path):
    code, text = _run(*options, script("write('started')"))
    assert code == 2 and said in text, text
    assert not (tmp_path / "started").exists()


def test_env_is_for_local_workers_too(script):
    code, text = _run("--workers=1", "--env=MINE=1", script("print(os.environ['MINE'])"))
    assert (code, text) == (0, "[worker 0] 1\n")


def test_hosts_are_read_as_they_are_written():
    hosts = Hosts.parse("user@[fe80::1]:3, gpu-2.x_y", rsh="true")
    assert [host.name for host in hosts.of_workers()] == ["[fe80::1]"] * 3 + ["gpu-2.x_y"]
    assert hosts.hosts[0].rsh_target == "user@fe80::1" and hosts.workers == 4


def test_what_travels_holds_no_secrets():
    given = {"TF_X": "1", "TFDIST_Y": "2", "AWS_SECRET_ACCESS_KEY": "3", "PATH": "4", "PYTHONPATH": "5", "OMP_Z": "6"}
    secrets = {
        "TF_TOKEN_app_terraform_io": "s",
        "TF_VAR_db_password": "s",
        "TF_CLI_ARGS": "s",
        "TFDIST_API_KEY": "s",
        "KERAS_secret": "s",
        "TFDIST_PROXY": "http://me:s@host/",
        "TFDIST_MONITOR": "127.0.0.1:4321/s",
    }
    assert travelling({**given, **secrets}) == {"TF_X": "1", "TFDIST_Y": "2", "PYTHONPATH": "5", "OMP_Z": "6"}


def test_a_secret_that_is_named_travels(script, tmp_path):
    shell = tmp_path / "rsh"  # as a login, it starts without the variables of this process
    shell.write_text('#!/bin/sh\nshift\nexec env -u TF_TOKEN_a -u TFDIST_PASSWORD sh -c "$1"\n')
    shell.chmod(0o755)
    path = script("print(*(os.environ.get(name) for name in ('TF_TOKEN_a', 'TFDIST_PASSWORD')))")
    options = ("--hosts=127.0.0.1", "--env=TFDIST_PASSWORD", f"--rsh={shell}")
    code, text = _run(*options, path, TF_TOKEN_a="s1", TFDIST_PASSWORD="s2")
    assert (code, text) == (0, "[worker 0] None s2\n")
