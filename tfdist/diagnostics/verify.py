"""`tfdist verify`: the promise as a command. Every strategy, loop and case against stock Keras on one device."""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tfdist.command import OptionParser, end, require_at_least, require_folder, write_json
from tfdist.config import did_you_mean
from tfdist.errors import EXIT_DONE, EXIT_FAILED, UsageError

STRATEGIES = ("one_device", "mirrored", "multi_worker")
LOOPS = ("fit", "custom")
BOUNDS: Mapping[str, float] = {
    "plain": 1e-4,
    "clip": 1e-4,
    "accumulate": 1e-4,
    "partial": 1e-4,
    "bfloat16": 2e-2,
    "float16": 5e-3,
    "masked": 1e-4,
    "weights": 1e-4,
    "sparse": 1e-4,
    "batch_norm": 1e-4,
    "hook_buckets": 1e-4,
    "hook_exact_start": 1e-4,
    "hook_local_sgd": 1e-4,
}
"""The cases, and the largest difference that is allowed: rounding of the format, a few times over."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        strategy: its name.
        replicas: how many it had.
        loop: "fit" or "custom".
        case: its name.
        difference: the largest one of all weights, losses and metrics.
        where: which of them it was.
        bound: the largest difference allowed.
    """

    strategy: str
    replicas: int
    loop: str
    case: str
    difference: float
    where: str
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within its bound (what is not a number is not)."""
        return self.difference <= self.bound


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist verify` with its arguments; returns the exit code."""
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit:
        return EXIT_DONE
    strategies = _chosen("--strategies", options.strategies, STRATEGIES)
    loops = _chosen("--loops", options.loops, LOOPS)
    cases = _chosen("--cases", options.cases, tuple(BOUNDS))
    perturbed, size = _perturbation(options.perturb, cases)
    require_at_least(
        {"--workers": (options.workers, 2), "--devices": (options.devices, 0), "--timeout": (options.timeout, 1)}
    )
    require_folder("--json", options.json)
    rows: list[Row] = []
    failures = 0
    with tempfile.TemporaryDirectory(prefix="tfdist-verify-") as folder:
        for strategy in ("stock", *strategies):
            print(f"verify: {strategy} ...", file=sys.stderr, flush=True)
            try:
                found = _trained(Path(folder), strategy, loops, cases, options)
            except _NotTrainedError as error:
                print(f"verify: {error}", file=sys.stderr, flush=True)
                if strategy == "stock":
                    return EXIT_FAILED
                failures += 1
                continue
            if strategy == "stock":
                expected = found[0]
                continue
            if perturbed:
                _plant(found[0], perturbed, size)
            rows += _compared(strategy, found, expected, loops, cases)
    print(_table(rows, failures))
    if options.json:
        write_json(options.json, _report(rows, failures))
    return EXIT_DONE if _all_ok(rows, failures) else EXIT_FAILED


def _all_ok(rows: list[Row], failures: int) -> bool:
    return not failures and all(row.ok for row in rows)


def _trained(
    folder: Path, strategy: str, loops: Sequence[str], cases: Sequence[str], options: argparse.Namespace
) -> list[dict[str, np.ndarray]]:
    """Runs the strategy in processes of its own; returns what each worker found."""
    script = str(Path(__file__).with_name("verify_run.py"))
    arguments = [script, str(folder), strategy, str(options.devices), ",".join(loops), ",".join(cases)]
    workers = options.workers if strategy == "multi_worker" else 1
    launcher = ["-m", "tfdist.cli", "launch", f"--workers={workers}"] if strategy == "multi_worker" else []
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    log = folder / f"{strategy}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"},
        )
        try:
            code = process.wait(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    if code == 0:
        return [dict(np.load(folder / f"{strategy}.{i}.npz", allow_pickle=False)) for i in range(workers)]
    what = f"did not end within {options.timeout:g} s (--timeout)" if code is None else f"failed with exit code {code}"
    last = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise _NotTrainedError(f"{strategy} {what}; its last lines:\n{last}")


class _NotTrainedError(RuntimeError):
    """A strategy could not be trained at all."""


def _compared(
    strategy: str,
    found: list[dict[str, np.ndarray]],
    expected: dict[str, np.ndarray],
    loops: Sequence[str],
    cases: Sequence[str],
) -> list[Row]:
    rows = []
    for loop in loops:
        for case in cases:
            differences = {}
            for name in (name for name in expected if name.startswith(f"stock/{case}/")):
                what = name.split("/", 2)[2]
                ours = [worker[f"{loop}/{case}/{what}"] for worker in found]
                differences[what] = difference(ours[0], expected[name])
                if any(not np.array_equal(ours[0], other) for other in ours[1:]):
                    differences[f"{what} (not the same on all workers)"] = np.inf
            where = max(differences, key=lambda what: np.nan_to_num(differences[what], nan=np.inf))
            replicas = int(found[0]["num_replicas"])
            rows.append(Row(strategy, replicas, loop, case, float(differences[where]), where, BOUNDS[case]))
    return rows


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference of two arrays, as a part of the largest magnitude in the expected one."""
    if found.shape != expected.shape:
        return np.inf
    return float(np.max(np.abs(found - expected), initial=0.0) / (np.max(np.abs(expected), initial=0.0) + 1e-6))


def _table(rows: list[Row], failures: int) -> str:
    lines = [f"{'strategy':<13} {'replicas':>8}  {'loop':<7} {'case':<16} {'difference':>10} {'bound':>9}"]
    for row in rows:
        verdict = "ok" if row.ok else f"EXCEEDED by {row.where}"
        lines.append(
            f"{row.strategy:<13} {row.replicas:>8}  {row.loop:<7} {row.case:<16} {row.difference:>10.1e} "
            f"{row.bound:>9.1e}  {verdict}"
        )
    wrong = sum(not row.ok for row in rows)
    if wrong:
        lines.append(f"{wrong} of {len(rows)} differ from one device by more than their bound")
    elif rows:
        lines.append(f"all {len(rows)} equal stock Keras on one device within their bounds")
    if failures:
        lines.append(f"{failures} of the strategies could not be trained (see above)")
    return "\n".join(lines)


def _report(rows: list[Row], failures: int) -> dict:
    return {
        "ok": _all_ok(rows, failures),
        "rows": [
            {**dataclasses.asdict(row), "difference": row.difference if np.isfinite(row.difference) else None}
            | {"ok": row.ok}
            for row in rows
        ],
    }


def _plant(found: dict[str, np.ndarray], case: str, size: float) -> None:
    for name in found:
        if f"/{case}/weights 00" in name:
            found[name].flat[0] += size


def _chosen(option: str, text: "str | None", allowed: tuple[str, ...]) -> list[str]:
    if text is None:
        return list(allowed)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise UsageError(f"{option}={text}: {name!r} is none of {', '.join(allowed)}{did_you_mean(name, allowed)}")
    if not names:
        raise UsageError(f"{option}={text}: name at least one of {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def _perturbation(text: "str | None", cases: list[str]) -> tuple[str, float]:
    if text is None:
        return "", 0.0
    case, _, size = text.partition(":")
    try:
        number = float(size)
    except ValueError:
        number = 0.0
    if case not in cases or not number:
        raise UsageError(
            f"--perturb={text}: give CASE:SIZE with one of the cases {', '.join(cases)}, such as plain:0.01"
        )
    return case, number


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="tfdist verify",
        description="Trains small models under every strategy, with fit and with TrainLoop, and compares weights, "
        "losses and metrics\nwith stock Keras on one device. A difference is the largest one in an array, as a part of "
        "the array's largest\nmagnitude. All workers must agree bit for bit.",
        epilog="cases: " + ", ".join(f"{case} (bound {bound:g})" for case, bound in BOUNDS.items()) + "\n\n"
        "exit code: 0 if every difference is within its bound; 1 if one is not, or a strategy could not be trained; 2 "
        "for\nwrong use.\n\n"
        "example: tfdist verify --strategies=mirrored --devices=4 --cases=plain,partial",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--strategies", metavar="A,B", help=f"default: {','.join(STRATEGIES)}")
    parser.add_argument("--loops", metavar="A,B", help=f"default: {','.join(LOOPS)} (custom is TrainLoop)")
    parser.add_argument("--cases", metavar="A,B", help="default: all")
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="workers of multi_worker (default: 2)")
    parser.add_argument(
        "--devices", metavar="N", type=int, default=0, help="replicas of mirrored (default: all GPUs, or 2 on CPUs)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the table to this file as well")
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=600.0, help="seconds that each strategy may take (default: 600)"
    )
    parser.add_argument(
        "--perturb", metavar="CASE:SIZE", help="a drill: add SIZE to a weight of that case, to see the check fail"
    )
    return parser
