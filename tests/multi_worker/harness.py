"""Test bodies that run on every worker of a real job, and once more with stock Keras in the test process.

`@on_workers(2)` makes a test of a body `def test_x(job): ...`. The body may assert, and returns a dict of values.
One job runs the bodies of all chosen tests one after the other, as starting one takes seconds. The values have to
be the same on every worker (except for those named `own_...`) and, with `stock=True`, equal to those that the body
returns with a `job` that has no strategy and leaves the model unprepared.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
CASE_TIMEOUT_S = 90.0
START_TIMEOUT_S = 120.0
BODIES: dict[str, Callable] = {}


class Job:
    """What a body is told.

    Attributes:
        strategy: the strategy; None in the test process.
        num_workers: workers in the job.
        index: which worker this is; 0 in the test process.
        folder: a folder that all workers share, empty when the body starts.
    """

    def __init__(self, strategy: Any, num_workers: int, index: int, folder: Path):
        self.strategy = strategy
        self.num_workers = num_workers
        self.index = index
        self.folder = folder

    @property
    def stock(self) -> bool:
        """Whether this is the run with stock Keras."""
        return self.strategy is None

    @property
    def chief(self) -> bool:
        """Whether this is worker 0."""
        return self.index == 0

    def scope(self) -> contextlib.AbstractContextManager:
        """Returns the strategy's scope."""
        return contextlib.nullcontext() if self.stock else self.strategy.scope()

    def prepare(self, model: Any, **options: Any) -> Any:
        """Prepares `model`, except in the test process."""
        if self.stock:
            return model
        import tfdist

        return tfdist.prepare(model, **options)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What distinguishes jobs.

    Attributes:
        workers: how many processes.
        mpi: they run under MPI as well.
        devices: CPU replicas of each.
    """

    workers: int
    mpi: bool
    devices: int


def on_workers(
    *counts: int,
    stock: bool = True,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    mpi: bool = False,
    devices: int = 1,
    then: "Callable[[list[dict]], None] | None" = None,
) -> Callable:
    """Makes a test, for each number of workers in `counts`, of a body that runs on every worker.

    Args:
        *counts: numbers of workers.
        stock: compare with stock Keras.
        rtol: relative tolerance of that comparison.
        atol: absolute tolerance of that comparison.
        mpi: the workers run under MPI as well.
        devices: CPU replicas of each worker.
        then: is called in the test process with what the workers returned.
    """

    def wrap(body: Callable) -> Callable:
        name = case_name(body)
        BODIES[name] = body

        @pytest.mark.timeout(900)
        @pytest.mark.parametrize("count", counts, ids=[f"{count}_workers" for count in counts])
        def test(count: int, jobs: "Jobs", tmp_path: Path) -> None:
            waiting = jobs.started(Kind(count, mpi, devices))
            expected = as_json(run_body(body, Job(None, count, 0, tmp_path))) if stock else None
            results = waiting.results(name)
            for index, result in enumerate(results[1:], 1):
                for key in result:
                    if not key.startswith("own_"):
                        assert_close(result[key], results[0][key], f"{key} on worker {index} and on worker 0", 0, 0)
            if expected is not None:
                assert sorted(results[0]) == sorted(expected)
                for key, value in expected.items():
                    assert_close(results[0][key], value, f"{key} and with stock Keras", rtol, atol)
            if then is not None:
                then(results)

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.case, test.kind = name, functools.partial(Kind, mpi=mpi, devices=devices)
        return test

    return wrap


def case_name(body: Callable) -> str:
    """Returns `folder/file.py:function` of a body."""
    return f"{Path(body.__code__.co_filename).resolve().relative_to(ROOT)}:{body.__name__}"


def load_body(name: str) -> Callable:
    """Returns the body called `name`, after loading its file."""
    if name not in BODIES:
        path = ROOT / name.partition(":")[0]
        spec = importlib.util.spec_from_file_location(f"cases_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return BODIES[name]


def run_body(body: Callable, job: Job) -> dict:
    """Runs a body from a known state of the host's generators; TensorFlow's own seed is left as it is."""
    random.seed(11)
    np.random.seed(11)
    return body(job) or {}


def as_json(value: Any) -> Any:
    """Returns nested lists, dicts, numbers and strings."""
    if isinstance(value, dict):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return np.asarray(value).tolist()


def assert_close(found: Any, expected: Any, what: str, rtol: float, atol: float) -> None:
    """Compares nested values, numbers with a tolerance."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and sorted(found) == sorted(expected), (what, found, expected)
        for key in expected:
            assert_close(found[key], expected[key], f"{key} of {what}", rtol, atol)
    elif isinstance(expected, list):
        assert len(found) == len(expected), (what, found, expected)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_close(a, b, f"[{i}] of {what}", rtol, atol)
    elif isinstance(expected, float) or isinstance(found, float):
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol, err_msg=what)
    else:
        assert found == expected, (what, found, expected)


class Jobs:
    """The jobs of a test run, one for each number of workers, started when first asked for.

    Args:
        folder: where they put their files.
        cases: for each kind of job the bodies to run.
    """

    def __init__(self, folder: Path, cases: dict["Kind", list[str]]):
        self._folder = folder
        self._cases = cases
        self._running: dict[Kind, Conductor] = {}

    def started(self, kind: "Kind") -> "Conductor":
        """Returns the job of that kind."""
        if kind not in self._running:
            folder = self._folder / f"{kind.workers}_workers_{kind.devices}_devices{'_mpi' * kind.mpi}"
            self._running[kind] = Conductor(kind, self._cases[kind], folder)
            self._running[kind].start()
        return self._running[kind]

    def close(self) -> None:
        """Ends all jobs."""
        for conductor in self._running.values():
            conductor.close()


class Conductor(threading.Thread):
    """Runs bodies on a job; starts another job for the rest where one fails or hangs."""

    def __init__(self, kind: "Kind", cases: Sequence[str], folder: Path):
        super().__init__(daemon=True)
        self._kind = kind
        self._left = list(cases)
        self._folder = folder
        self._known = threading.Condition()
        self._results: dict[str, list | str] = {}
        self._closed = False

    def results(self, name: str) -> list[dict]:
        """Returns what each worker returned from the body `name`; fails the test where one raised or hung."""
        with self._known:
            found = self._known.wait_for(lambda: name in self._results, timeout=850)
            if not found:
                pytest.fail(f"{name} got no turn")
            results = self._results[name]
        if isinstance(results, str):
            pytest.fail(results, pytrace=False)
        return results

    def run(self) -> None:
        """Runs all bodies."""
        attempt = 0
        while self._left and not self._closed:
            self._one_job(self._folder / f"job_{attempt}")
            attempt += 1

    def close(self) -> None:
        """Ends the job."""
        self._closed = True
        self.join(60)

    def _one_job(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "cases.json").write_text(json.dumps(self._left))
        log = folder / "log.txt"
        count = self._kind.workers
        command = [str(WORKER), str(folder), str(self._kind.devices)]
        with start_workers(count, command, log, mpi=self._kind.mpi) as process:
            number, deadline = 0, time.monotonic() + START_TIMEOUT_S
            while self._left and not self._closed:
                ended = process.poll() is not None  # looked at first: a worker writes its file before it ends
                files = [folder / f"{number}.{i}.json" for i in range(count)]
                known = {i: json.loads(file.read_text()) for i, file in enumerate(files) if file.exists()}
                errors = [result["error"] for result in known.values() if "error" in result]
                if len(known) == count and not errors:
                    self._add([known[i]["values"] for i in range(count)])
                    number, deadline = number + 1, time.monotonic() + CASE_TIMEOUT_S
                elif len(known) == count or ended or time.monotonic() > deadline:
                    missing = [i for i in range(count) if i not in known]
                    if missing:
                        why = f"the job ended with {process.returncode}" if ended else "no answer in time"
                        errors.append(f"workers {missing}: {why}; end of {log}:\n{_tail(log)}")
                    self._add("\n\n".join(errors))
                    return
                else:
                    time.sleep(0.02)

    def _add(self, results: "list | str") -> None:
        with self._known:
            self._results[self._left.pop(0)] = results
            self._known.notify_all()


def _tail(log: Path) -> str:
    return log.read_bytes()[-3000:].decode(errors="replace")


@contextlib.contextmanager
def start_workers(count: int, command: Sequence[str], log: Path, *, mpi: bool = False, **env: str) -> Any:
    """Starts `tfdist launch` with its output in `log`; ends what is left of it."""
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tfdist.cli", "launch", f"--workers={count}", *["--mpi"] * mpi, *command],
            cwd=ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGTERM):  # the second one kills the workers
                process.send_signal(number)
                time.sleep(0.3)
        process.wait(30)
