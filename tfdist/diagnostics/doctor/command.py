"""`tfdist doctor`: seconds of checks of machines, network and files, within the job that is to run."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfdist.cluster.base import Cluster
from tfdist.command import OptionParser, end, require_at_least, require_folder, write_json
from tfdist.diagnostics.doctor.data import check_spec
from tfdist.diagnostics.doctor.job import examine
from tfdist.diagnostics.doctor.report import Report, Status
from tfdist.diagnostics.doctor.worker import Options
from tfdist.errors import EXIT_DONE, EXIT_FAILED, UsageError
from tfdist.launch.signals import CaughtSignals

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red", Status.SKIPPED: "dim"}
_WIDTH = 120
_LONGEST_TIMEOUT_S = 3600
_LONGEST_S = 300.0
_TICK_S = 0.05
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist doctor` with its arguments; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit:
        return EXIT_DONE
    cluster = Cluster.detect()
    told = _checked(options, cluster)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.workers is not None:
        report = _started(options, told)
        if report is None:
            return EXIT_FAILED
        _publish(report, options.json)
    else:
        with ended_in_order():
            report = examine(cluster, told, lambda report: _publish(report, options.json))
    return EXIT_FAILED if report.failed else EXIT_DONE


def _checked(options: argparse.Namespace, cluster: Cluster) -> Options:
    require_at_least({"--timeout": (options.timeout, 1)})
    if not options.timeout <= _LONGEST_TIMEOUT_S:
        raise UsageError(f"--timeout={options.timeout:g}: at most {_LONGEST_TIMEOUT_S} seconds are allowed")
    if cluster.is_chief:  # which alone writes it
        require_folder("--json", options.json)
    if options.checkpoint_dir is not None and (not options.checkpoint_dir or "://" in options.checkpoint_dir):
        raise UsageError(
            f"--checkpoint_dir={options.checkpoint_dir}: give a folder of a disk that the machines have mounted"
        )
    if options.data is not None:
        check_spec(options.data)
    if options.workers is not None:
        require_at_least({"--workers": (options.workers, 1)})
        if cluster.num_workers > 1:
            raise UsageError(
                f"--workers={options.workers}: this process is one of the {cluster.num_workers} workers of a job "
                f"already ({cluster.source}); leave --workers out to check that job"
            )
    return Options(options.checkpoint_dir or "", options.data or "", options.timeout)


def _started(options: argparse.Namespace, told: Options) -> "Report | None":
    """Starts the workers on this machine; returns their report, or None where there is none.

    A signal ends the workers first, who remove what they have left behind, and then this process.
    """
    script = str(Path(__file__).with_name("run.py"))
    with CaughtSignals() as caught, tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as folder:
        out = Path(folder) / "report.json"
        command = ["-m", "tfdist.cli", "launch", f"--workers={options.workers}", script, str(out)]
        process = subprocess.Popen(
            [sys.executable, *command, told.checkpoint_dir, told.data, str(told.timeout_s)],
            stdout=sys.stderr,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process alone: a second signal would kill the workers
        )
        deadline = time.monotonic() + _LONGEST_S + 6 * told.timeout_s
        numbers: list[int] = []
        try:
            while (code := process.poll()) is None and not numbers and time.monotonic() < deadline:
                time.sleep(_TICK_S)
                numbers = caught.take()
        finally:
            end(process)
        if numbers:
            raise SystemExit(128 + numbers[0])
        if not out.exists():
            what = "did not end" if code is None else f"ended with exit code {code} and no report (see above)"
            print(f"doctor: the workers {what}", file=sys.stderr)
            return None
        return Report.from_json(json.loads(out.read_text()))


def _publish(report: Report, file: "str | None") -> None:
    """Prints the report; worker 0's goes to the file as well."""
    _show(report)
    if file and report.author == 0:
        write_json(file, report.to_json())


def _show(report: Report) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    table = Table("check", "result", "found")
    for finding in report.findings:
        style = _STYLES[finding.status]
        table.add_row(finding.check, f"[{style}]{finding.status.value}[/]", escape(finding.found))
    console.print(table)
    for finding in report.findings:
        if finding.status in (Status.WARNING, Status.FAILED):
            console.print(f"{escape(finding.check)} ({finding.status.value}): {escape(finding.fix)}", soft_wrap=True)
    failed = sum(finding.status is Status.FAILED for finding in report.findings)
    console.print(f"{failed} of {len(report.findings)} checks failed" if failed else "nothing failed")
    sys.stdout.flush()


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Turns a signal that ends this process into an exit that removes what it has left in the checkpoint folder.

    More signals that come meanwhile change nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}

    def leave(number: int, _: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="tfdist doctor",
        description="Checks versions, devices, network, clocks, memory and files within seconds, before a long job.\n"
        "Start it as the job will be started: with srun, mpiexec, or TF_CONFIG on each machine, every worker with the\n"
        "same arguments. Alone it checks this machine. Worker 0 prints what was found.",
        epilog="exit code: 0 if no check failed (warnings are no failures); 1 if one did; 2 for wrong use.\n\n"
        "example: srun tfdist doctor --checkpoint_dir=/shared/run --data='tfrecord:/data/*.tfrecord'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workers", metavar="N", type=int, help="start N workers on this machine, and check those")
    parser.add_argument(
        "--checkpoint_dir", metavar="DIR", help="has to be writable, and the same folder on all workers"
    )
    parser.add_argument(
        "--data", metavar="SPEC", help="as for scripts/train.py, or a path or glob; has to be the same on all workers"
    )
    parser.add_argument("--json", metavar="FILE", help="worker 0 writes the report to this file as well")
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=30.0, help="seconds to wait for the other workers (default: 30)"
    )
    return parser
