"""`tfdist scale` and `tfdist report`: end to end on a small training, and what they refuse."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist.cli import main
from tfdist.telemetry.record import FILE_NAME, read_record

TRAINING = str(Path(__file__).with_name("planted_training.py"))
SMALL = ["--global_batch_size=64", "--steps=30"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "sweep"


@pytest.mark.timeout(200)
def test_a_sweep_goes_on_where_it_stopped_and_reports_what_failed(out, tmp_path, capsys):
    script = tmp_path / "training.py"
    script.write_text(
        "import json, os, runpy, sys\n"
        "if 'noop' in ' '.join(sys.argv) and not os.path.exists(os.path.dirname(__file__) + '/mended'):\n"
        "    sys.exit('out of luck')\n"
        f"sys.argv[0] = {TRAINING!r}\nrunpy.run_path({TRAINING!r}, run_name='__main__')\n"
    )
    command = ["scale", "--replicas=1,2", "--modes=strong", "--repeats=1", f"--out={out}", "--", str(script), *SMALL]
    assert main(command) == 1
    shown = capsys.readouterr().out
    assert "did not run: strong-2-noop-0: exit code 1" in shown
    assert "out of luck" in (out / "report.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in out.glob(f"runs/*/{FILE_NAME}")}
    assert {path.parent.name for path in before} == {"strong-1-0", "strong-2-0"}
    (tmp_path / "mended").touch()
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before  # not trained again
    assert read_record(out / "runs" / "strong-2-noop-0").hook == "noop"
    data = json.loads((out / "report.json").read_text())
    sizes = data["modes"][0]["sizes"]
    assert [size["replicas"] for size in sizes] == [1, 2] and len(sizes[1]["ceiling_ms"]) == 1
    assert {size["global_batch_size"] for size in sizes} == {64}

    # The same runs, compared one by one.
    runs = [str(out / "runs" / name) for name in ("strong-1-0", "strong-2-0")]
    assert main(["report", f"--out={tmp_path / 'report'}", *runs]) == 0
    assert capsys.readouterr().out.count("ms a step;") == 2
    assert (tmp_path / "report" / "report.html").exists()
    assert main(["report", f"--out={tmp_path / 'report'}", *runs]) == 2
    assert "nothing was overwritten" in capsys.readouterr().err
    other = json.loads((out / "runs" / "strong-1-0" / FILE_NAME).read_text())
    other["model"] = {"name": "another", "parameters": 5, "shapes_sha256": "y"}
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / FILE_NAME).write_text(json.dumps(other))
    assert main(["report", f"--out={tmp_path / 'two'}", runs[0], str(tmp_path / "another")]) == 2
    error = capsys.readouterr().err
    assert "'another' with 5 parameters" in error and "only runs of one model" in error
    assert not (tmp_path / "two").exists()
    damaged = next((out / "runs" / "strong-1-0").glob("*tfevents*"))
    damaged.write_bytes(damaged.read_bytes()[:-5])
    assert main(["report", f"--out={tmp_path / 'two'}", runs[0]]) == 2
    assert damaged.name in capsys.readouterr().err


@pytest.mark.timeout(150)
def test_an_interrupted_sweep_leaves_no_process_and_goes_on(out, tmp_path):
    script = tmp_path / "training.py"
    script.write_text(
        "import os, pathlib, runpy, sys, time\n"
        f"pid = pathlib.Path({str(tmp_path / 'pid')!r})\n"
        "if not pid.exists():\n"
        "    pid.with_suffix('.new').write_text(str(os.getpid()))\n"
        "    pid.with_suffix('.new').rename(pid)\n"
        "    time.sleep(100)\n"
        f"sys.argv[0] = {TRAINING!r}\nrunpy.run_path({TRAINING!r}, run_name='__main__')\n"
    )
    command = ["scale", "--replicas=1", "--repeats=1", f"--out={out}", "--", str(script), *SMALL]
    sweep = subprocess.Popen([sys.executable, "-m", "tfdist.cli", *command])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists():
            assert sweep.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        sweep.terminate()
        assert sweep.wait(60) == 143
    finally:
        sweep.kill()
        sweep.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert main(command) == 0
    assert {path.name for path in (out / "runs").iterdir()} == {"strong-1-0", "strong-1-0.interrupted-1"}


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("print('hello')", "it ended without training steps"),
        ("import sys; sys.exit('error: --data is missing') if 0 else sys.exit(2)", "exit code 2"),
    ],
)
def test_a_command_that_does_not_train(out, tmp_path, capsys, body, named):
    script = tmp_path / "script.py"
    script.write_text(body)
    assert main(["scale", "--replicas=1", f"--out={out}", "--", str(script)]) == 2
    error = capsys.readouterr().err
    assert str(script) in error and named in error


@pytest.mark.timeout(100)
def test_a_run_that_takes_too_long(out, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import time; print('begun', flush=True); time.sleep(60)")
    assert main(["scale", "--replicas=1", "--repeats=1", f"--out={out}", "--timeout=3", "--", str(script)]) == 2
    assert "did not end within 3 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--replicas"),
        (["--replicas=1,2"], "--out"),
        (["--replicas=0", "--out=OUT", "--", TRAINING], "--replicas=0"),
        (["--replicas=1", "--out=OUT"], "SCRIPT is missing"),
        (["--replicas=1", "--out=OUT", "--", "missing.py"], "'missing.py' does not exist"),
        (["--replicas=500", "--out=OUT", "--", TRAINING], "500 replicas are more than"),
        (["--replicas=1", "--out=OUT", "--modes=big", "--", TRAINING], "--modes=big"),
        (["--replicas=1", "--out=OUT", "--repeats=0", "--", TRAINING], "--repeats=0"),
        (["--replicas=1", "--out=OUT", "--launcher=srun", "--", TRAINING], "{replicas}"),
        (["--replicas=1", "--out=OUT", "--", TRAINING, "--log_dir=x"], "--log_dir in the command"),
        (["--replicas=1", "--out=OUT", "--", TRAINING, "--checkpoint_dir=x"], "--checkpoint_dir in the command"),
        (["--replicas=1", "--out=OUT", "--predict=x", "--", TRAINING], "--replicas=x"),
    ],
)
def test_wrong_use_of_scale(out, capsys, options, named):
    assert main(["scale", *(option.replace("OUT", str(out)) for option in options)]) == 2
    assert named in capsys.readouterr().err and not out.exists()


def test_wrong_use_of_report(tmp_path, capsys):
    assert main(["report", f"--out={tmp_path / 'r'}"]) == 2
    assert main(["report", f"--out={tmp_path / 'r'}", str(tmp_path / "missing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "events.out.tfevents.1.host").write_bytes(b"x")
    assert main(["report", f"--out={tmp_path / 'r'}", str(tmp_path / "foreign")]) == 2
    assert "was not written by it" in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_help_needs_no_tensorflow():
    code = "import sys; from tfdist.cli import main; main(['scale', '--help']); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("False\n") and "--launcher" in done.stdout


def test_the_script_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "scripts/scale.py", "--replicas=x", f"--out={tmp_path}/o"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "--replicas=x" in done.stderr
