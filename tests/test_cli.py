"""The `tfdist` command: subcommands, messages, exit codes, and that it starts fast."""

import subprocess
import sys

import pytest

from tfdist import cli
from tfdist.errors import PeerError, UsageError

pytestmark = pytest.mark.timeout(60)


def _run(*args: str, program: tuple[str, ...] = ("-m", "tfdist.cli")) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *program, *args], capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    "args", [["--help"], ["-h"], ["launch", "--help"], ["launch", "--workers=2", "-h"], ["--version"]]
)
def test_help_and_version(args, capsys):
    assert cli.main(args) == 0
    out, err = capsys.readouterr()
    assert "tfdist" in out and err == ""
    if "launch" in args:
        assert "--log_dir" in out
    elif "--version" not in args:
        assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "a command is missing"),
        (["lunch"], "no command 'lunch'; the commands are launch, env, doctor, verify"),
        (["--nothing"], "--nothing"),
        (["launch"], "--workers"),
        (["launch", "--workers"], "--workers"),
        (["launch", "--workers=two", "x.py"], "invalid int value: 'two'"),
        (["launch", "--work=2", "x.py"], "--work"),
        (["launch", "--workers=2"], "SCRIPT is missing"),
        (["launch", "--workers=2", "--"], "SCRIPT is missing"),
        (["launch", "--workers=0", __file__], "workers=0"),
        (["launch", "--workers=2", "no-such-file.py"], "'no-such-file.py' does not exist"),
        (["launch", "--workers=2", "--start_port=0", __file__], "start_port=0"),
    ],
)
def test_wrong_use_is_exit_code_2(args, said, capsys):
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tfdist: error: ") and said in err


@pytest.mark.parametrize(("error", "code"), [(UsageError("x"), 2), (PeerError("x"), 1), (KeyboardInterrupt(), 130)])
def test_errors_become_exit_codes(error, code, monkeypatch):
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "fail", cli.Command("fails", fail))
    assert cli.main(["fail"]) == code


def test_a_command_gets_its_arguments_untouched(monkeypatch):
    got = []
    monkeypatch.setitem(cli.COMMANDS, "take", cli.Command("takes", lambda arguments: got.extend(arguments) or 3))
    assert cli.main(["take", "--help", "--", "-x"]) == 3
    assert got == ["--help", "--", "-x"]


@pytest.mark.parametrize("options", [["--workers=2"], ["--workers", "2"], ["--workers=2", "--"]])
def test_everything_after_the_script_is_the_script_s(options, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    run = _run("launch", *options, str(tmp_path / "script.py"), "--workers=9", "--", "--log_dir", "-h")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [
        f"[worker {index}] ['--workers=9', '--', '--log_dir', '-h']" for index in range(2)
    ]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_launch_returns_the_exit_code_of_the_job(code, tmp_path):
    (tmp_path / "script.py").write_text(f"raise SystemExit({code})")
    run = _run("launch", "--workers=2", f"--log_dir={tmp_path}", str(tmp_path / "script.py"))
    assert run.returncode == code
    assert (tmp_path / "worker-1.log").exists()


def test_starts_without_tensorflow():
    program = (
        "import sys, tfdist.cli, tfdist.cluster, tfdist.launch; tfdist.cli.main(['launch', '--help']);"
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert _run(program=("-c", program)).returncode == 0
