"""`tfdist report`: compares runs that exist already."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tfdist.command import OptionParser
from tfdist.errors import EXIT_DONE, UsageError
from tfdist.scaling.report import FILES, write_report
from tfdist.scaling.result import analyse
from tfdist.scaling.sizes import size_of
from tfdist.telemetry.record import RunRecord, read_record, require_readable_events


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist report`; returns the exit code.

    Raises:
        UsageError: wrong options, or folders whose runs cannot be compared.
    """
    try:
        options = _parser().parse_args(list(arguments))
    except SystemExit:  # --help was printed
        return EXIT_DONE
    runs = [Path(run) for run in options.runs]
    records = [_checked(run) for run in runs]
    _require_one_model(runs, records)
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out={out}: a folder is needed, new or existing; nothing was overwritten")
    there = [name for name in FILES if (out / name).exists()]
    if there:
        raise UsageError(f"--out={out}: {there[0]} is there already; nothing was overwritten, give another folder")
    out.mkdir(parents=True, exist_ok=True)
    result = analyse(
        [size_of("given", [record]) for record in records],
        title=f"{len(runs)} run(s) of {records[0].model['name']}",
        notes=[
            f"{run} did not end: these are its figures when they were last written."
            for run, record in zip(runs, records, strict=True)
            if not record.finished
        ],
    )
    names = [f"{letter}: {run.name}" for letter, run in zip(result.modes[0].labels, runs, strict=True)]
    files = write_report(result, out, names=names)
    for run, diagnosis in zip(runs, result.modes[0].diagnoses, strict=True):
        print(f"{run}: {diagnosis.step_ms:.2f} ms a step; {diagnosis.headline}")
    print(f"report: {files[0]} (and .md, .json)")
    return EXIT_DONE


def _checked(run: Path) -> RunRecord:
    record = read_record(run)
    require_readable_events(run)
    return record


def _require_one_model(runs: Sequence[Path], records: Sequence[RunRecord]) -> None:
    for run, record in zip(runs, records, strict=True):
        if record.model["shapes_sha256"] != records[0].model["shapes_sha256"]:
            first, other = (
                f"{r.model['name']!r} with {r.model['parameters']:,} parameters" for r in (records[0], record)
            )
            raise UsageError(
                f"{str(runs[0])!r} trains {first}, {str(run)!r} trains {other}: only runs of one model can be compared"
            )


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="tfdist report",
        usage="tfdist report --out=DIR RUN...",
        description="Reports on runs that exist already: where their steps go, who holds whom up, what to change.",
        epilog="RUN is a folder that tfdist.ScalingCallback, or --log_dir of scripts/train.py, wrote to.\n\n"
        "exit code: 0; 2 for wrong use.\n\nexample: tfdist report --out=runs/report runs/one runs/two",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders of runs")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the report")
    return parser
