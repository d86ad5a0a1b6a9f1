"""Every command and every program in README.md, BUILD.md and docs/ runs, and the table of flags is complete."""

import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from absl import flags as absl_flags

from tfdist import flags

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "BUILD.md", *sorted((ROOT / "docs").glob("*.md"))]

# Commands that would run this suite within itself, or that another test runs with more care.
ELSEWHERE = {
    "./scripts/quickstart.sh": "tests/scripts/test_quickstart.py::test_quickstart_from_nothing",
    ".venv/bin/tfdist verify": "tests/diagnostics/test_verify.py::test_everything_equals_one_device",
    ".venv/bin/tfdist launch --hosts=gpu1,gpu2 scripts/train.py --strategy=multi_worker --model=mlp --data=digits "
    "--steps=200": "tests/launch/test_hosts.py::test_a_training_on_hosts_survives_the_loss_of_a_worker",
    ".venv/bin/tfdist launch --hosts=gpu1:2,gpu2:2 --rsh='ssh -p 2222' --env=MY_DATA=/data script.py": (
        "tests/launch/test_hosts.py::test_indices_follow_the_hosts_and_ports_are_free"
    ),
    "./scripts/test.sh": "itself: what runs this suite",
    "./scripts/test.sh --slow": "itself: what .ci/run runs",
    ".venv/bin/ruff format .": "itself: scripts/test.sh runs it with --check",
}


def blocks(language: str) -> list:
    """Returns (name, text) of every fenced block of `language`."""
    found = []
    for document in DOCUMENTS:
        for i, match in enumerate(re.finditer(r"^```(\w*)\n(.*?)^```", document.read_text(), re.M | re.S)):
            assert match[1] in ("python", "sh"), f"{document}: a block in {match[1]!r}, which no test runs"
            if match[1] == language:
                found.append(pytest.param(match[2], id=f"{document.name}-{i}"))
    return found


def commands() -> list:
    lines = [line for block in blocks("sh") for line in block.values[0].splitlines() if line.strip()]
    return list(dict.fromkeys(lines))


def environment() -> dict:
    return {**os.environ, "PYTHONPATH": f".{os.pathsep}{os.environ['PYTHONPATH']}", "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture
def folder(copy_of_repository, tmp_path):
    """A copy of the repository with this environment, where commands may write."""
    copy_of_repository(tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.mark.parametrize("program", blocks("python"))
def test_programs_run(folder, program):
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if c not in ELSEWHERE])
def test_commands_run(folder, command):
    if command.startswith("./scripts/test.sh "):  # the same without the environment that it makes
        command = shlex.join([".venv/bin/python", "-m", "pytest", *shlex.split(command)[1:]])
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if "pip wheel" in command:
        (wheel,) = (folder / "dist").glob("tfdist-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        modules = {str(path.relative_to(folder)) for path in (folder / "tfdist").rglob("*.py")}
        assert modules | {"tfdist/py.typed"} <= set(names)
        assert any(name.endswith("licenses/LICENSE") for name in names)


def test_commands_that_run_elsewhere_are_still_written_and_their_tests_exist():
    assert set(ELSEWHERE) <= set(commands())
    for place in ELSEWHERE.values():
        path, separator, name = place.partition("::")
        assert not separator or f"def {name}(" in (ROOT / path).read_text(), place


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert target.startswith("http") or (document.parent / target).exists(), f"{document}: {target}"


def test_the_table_of_flags_is_complete():
    values = absl_flags.FlagValues()
    before = set(values)
    flags.define(values)
    table = re.search(r"^\| flag \| meaning \|$.*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)[0]
    written = set(re.findall(r"`--(\w+)`", table))
    assert written == set(values) - before


def test_paths_and_names_of_code_exist():
    """Every `path/in/the/repository` and every `tfdist.name` that the documents speak of is there."""
    import tfdist

    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
        for code in re.findall(r"`([^`\n]+)`", text):
            if re.fullmatch(r"(tfdist|models|scripts|tests|docs)/[\w/.]*", code):
                assert (ROOT / code).exists(), f"{document.name}: {code}"
            for name in re.findall(r"\btfdist((?:\.[A-Za-z_]\w*)+)", code):
                value = tfdist
                for part in name.split(".")[1:]:
                    assert hasattr(value, part), f"{document.name}: tfdist{name}"
                    value = getattr(value, part)
