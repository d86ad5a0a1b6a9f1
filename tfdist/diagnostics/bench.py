"""`tfdist bench`: what an all-reduce costs between local workers, size by size, as nccl-tests show it."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.mpi import is_installed
from tfdist.command import OptionParser, end, require_at_least, require_folder, write_json
from tfdist.errors import EXIT_DONE, EXIT_FAILED, UsageError

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclasses.dataclass(frozen=True)
class Row:
    """One size.

    Attributes:
        transport: what moved the bytes.
        bytes: of the buffer.
        microseconds: median of one all-reduce, out of place.
        wrong: elements that did not come out as the exact sum, over all workers.
        workers: how many took part.
    """

    transport: str
    bytes: int
    microseconds: float
    wrong: int
    workers: int

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in GB/s: the buffer's bytes over the time."""
        return self.bytes / self.microseconds / 1e3

    @property
    def busbw(self) -> float:
        """Bus bandwidth in GB/s: algbw times 2 (n - 1) / n, comparable with what the link can do for any n."""
        return self.algbw * 2 * (self.workers - 1) / self.workers


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist bench` with its arguments; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit:
        return EXIT_DONE
    require_at_least(
        {"--workers": (options.workers, 2), "--rounds": (options.rounds, 1), "--timeout": (options.timeout, 1)}
    )
    smallest, largest = (_size(name, text) for name, text in (("--from", options.smallest), ("--to", options.largest)))
    if smallest > largest:
        raise UsageError(f"--from={options.smallest} is larger than --to={options.largest}")
    require_folder("--json", options.json)
    transports = _transports(options.transports)
    sizes = [smallest]
    while sizes[-1] * options.factor <= largest:
        sizes.append(sizes[-1] * options.factor)
    rows = _measured(sizes, transports, options)
    if rows is None:
        return EXIT_FAILED
    print(_table(rows))
    if options.json:
        found = [{**dataclasses.asdict(row), "algbw": row.algbw, "busbw": row.busbw} for row in rows]
        write_json(options.json, found)
    return EXIT_FAILED if any(row.wrong for row in rows) else EXIT_DONE


def _measured(sizes: Sequence[int], transports: Sequence[str], options: argparse.Namespace) -> "list[Row] | None":
    script = str(Path(__file__).with_name("bench_run.py"))
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
        out = Path(folder) / "rows.json"
        mpi = ["--mpi"] if "mpi" in transports else []
        command = ["-m", "tfdist.cli", "launch", f"--workers={options.workers}", *mpi, script]
        process = subprocess.Popen(
            [sys.executable, *command, str(options.rounds), str(out), ",".join(transports), *map(str, sizes)],
            stdout=sys.stderr,
            stdin=subprocess.DEVNULL,
            env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"},
        )
        try:
            code = process.wait(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            print(f"bench: did not end within {options.timeout:g} s (--timeout)", file=sys.stderr)
            return None
        finally:
            end(process)
        if code:
            print(f"bench: failed with exit code {code} (see above)", file=sys.stderr)
            return None
        return [Row(**row) for row in json.loads(out.read_text())]


def _transports(text: "str | None") -> list[str]:
    """Returns the transports that `text` lists, or all that can be used here."""
    if text is None:
        return ["collective", "mpi"] if is_installed() else ["collective"]
    names = text.split(",")
    for name in names:
        if name not in ("collective", "mpi"):
            raise UsageError(f"--transports={text}: choose out of collective and mpi, with a comma between them")
    if "mpi" in names and not is_installed():
        raise UsageError(f"--transports={text}: mpi4py is not installed; pip install 'tfdist[mpi]'")
    return list(dict.fromkeys(names))


def _table(rows: Sequence[Row]) -> str:
    lines = [
        f"all-reduce of float32 sums between {rows[0].workers} workers, out of place, medians",
        f"{'transport':<11} {'size':>12} {'time':>12} {'algbw':>8} {'busbw':>8} {'#wrong':>7}",
        f"{'':<11} {'(B)':>12} {'(us)':>12} {'(GB/s)':>8} {'(GB/s)':>8}",
    ]
    lines += [
        f"{row.transport:<11} {row.bytes:>12} {row.microseconds:>12.1f} {row.algbw:>8.3f} {row.busbw:>8.3f} "
        f"{row.wrong:>7}"
        for row in rows
    ]
    return "\n".join(lines)


def _size(name: str, text: str) -> int:
    """Returns the bytes that a size such as 64k means, a multiple of 4."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:] in _UNITS and number[-1:] else ""
    digits = number.removesuffix(unit) if unit else number
    if not digits.isdecimal() or int(digits) * _UNITS[unit] < 4:
        raise UsageError(f"{name}={text}: a size of at least 4 bytes is needed, such as 1024, 64k or 256M")
    return int(digits) * _UNITS[unit] // 4 * 4


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="tfdist bench",
        description="Times all-reduces of several sizes between local workers, in the manner of nccl-tests, and checks "
        "each sum.",
        epilog="algbw is bytes over time; busbw is algbw times 2(n-1)/n, which compares with the link for any number "
        "of workers.\n\nexit code: 0; 1 if a sum was wrong or the workers failed; 2 for wrong use.\n\n"
        "example: tfdist bench --workers=2 --from=64k --to=16M",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--from", dest="smallest", metavar="SIZE", default="1k", help="smallest buffer (default: 1k)")
    parser.add_argument("--to", dest="largest", metavar="SIZE", default="256M", help="largest buffer (default: 256M)")
    parser.add_argument("--factor", metavar="N", type=int, choices=range(2, 1025), default=4, help="default: 4")
    parser.add_argument(
        "--transports", metavar="LIST", help="collective, mpi, or both with a comma (default: all that are installed)"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="times that each size runs (default: 5)")
    parser.add_argument("--timeout", metavar="S", type=float, default=600.0, help="seconds in all (default: 600)")
    parser.add_argument("--json", metavar="FILE", help="write the table to this file as well")
    return parser
