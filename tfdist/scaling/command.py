"""`tfdist scale`: a training command at several sizes, and why it does not scale better."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tfdist.command import OptionParser, require_at_least
from tfdist.errors import EXIT_DONE, EXIT_FAILED, UsageError
from tfdist.scaling.machine import Machine, this_machine
from tfdist.scaling.plan import Plan, Trial, parse_modes, parse_replicas
from tfdist.scaling.report import write_report
from tfdist.scaling.result import analyse
from tfdist.scaling.sizes import sizes_of
from tfdist.scaling.sweep import Outcome, run_sweep


def main(arguments: Sequence[str]) -> int:
    """Runs `tfdist scale`; returns the exit code.

    Raises:
        UsageError: wrong options, or a command that does not train.
    """
    arguments = list(arguments)
    place = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        options = _parser().parse_args(arguments[:place])
    except SystemExit:  # --help was printed
        return EXIT_DONE
    require_at_least({"--repeats": (options.repeats, 1), "--timeout": (options.timeout, 1)})
    plan = Plan(
        command=tuple(arguments[place + 1 :]),
        replicas=parse_replicas(options.replicas),
        modes=parse_modes(options.modes),
        repeats=options.repeats,
        launcher=options.launcher,
    )
    machine = this_machine()
    if plan.launcher is None:
        machine.require(plan.replicas[-1], oversubscribe=options.oversubscribe)
        if not Path(plan.command[0]).is_file():
            raise UsageError(f"the script {plan.command[0]!r} does not exist; give the path of a Python file")
    targets = parse_replicas(options.predict) if options.predict else ()
    out = Path(options.out)
    plan.keep_in(out)
    # Without this a SIGTERM would leave the run at hand behind; the launcher passes it on to the workers.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        outcome = _run(plan, out, machine, options.timeout)
    finally:
        signal.signal(signal.SIGTERM, before)
    sizes = sizes_of(outcome.records)
    if not sizes:
        raise UsageError(f"no size ran: {outcome.failures[0].why}")
    result = analyse(
        sizes,
        title=f"How {' '.join(plan.command[:1])} scales: {', '.join(map(str, plan.replicas))} replicas",
        sharing=machine.sharing if plan.launcher is None else lambda replicas: 1.0,
        targets=targets,
        failures=[(failure.trial.name, failure.why) for failure in outcome.failures],
        notes=_notes(plan, machine, outcome),
    )
    files = write_report(result, out)
    print(result.headline)
    for cause in result.modes[0].diagnoses[-1].causes[:1]:
        print(f"what would help most: {cause.advice}")
    for failure in outcome.failures:
        print(f"did not run: {failure.trial.name}: {failure.why.splitlines()[0]}")
    print(f"report: {files[0]} (and .md, .json; plots: tensorboard --logdir={out})")
    return EXIT_FAILED if outcome.failures else EXIT_DONE


def _run(plan: Plan, out: Path, machine: Machine, timeout: float) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(plan.trials()))

        def progress(trial: Trial, done: bool) -> None:
            what = f"{trial.mode}, {trial.replicas} replica(s){', no communication' if trial.ceiling else ''}"
            bar.update(task, advance=int(done), description=f"{what}, repeat {trial.repeat + 1}/{plan.repeats}")

        return run_sweep(plan, out, machine, timeout=timeout, progress=progress)


def _notes(plan: Plan, machine: Machine, outcome: Outcome) -> list[str]:
    notes = []
    if plan.launcher is None and not machine.gpus:
        notes.append(
            "Replicas are CPU workers on one machine, "
            f"each pinned to {machine.cores_each(plan.replicas[-1])} core(s) of its own."
        )
        if plan.replicas[-1] > machine.cores:
            notes.append(
                f"More than {machine.cores} replicas share cores here: such sizes say little about real machines."
            )
    if any(record.steps < 20 for record in outcome.records.values()):
        notes.append("Some runs timed fewer than 20 steps; train longer for figures to rely on.")
    if plan.repeats < 3:
        notes.append(f"Each run was made {plan.repeats} time(s): three or more give intervals to rely on.")
    return notes


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="tfdist scale",
        usage="tfdist scale --replicas=1,2,4 --out=DIR [OPTIONS] -- SCRIPT ARGS...",
        description="Trains at several numbers of replicas, each in fresh processes, with and without communication, "
        "and reports how it scales, where the time goes, and which one change would help most.",
        epilog="SCRIPT has to take the flags --log_dir, --hook and --global_batch_size, as scripts/train.py does, and "
        "to give\ntfdist.ScalingCallback(log_dir) to fit or TrainLoop. On a machine with GPUs each size is one process "
        "with as\nmany of them; without, each replica is a worker with cores of its own. An interrupted sweep goes on "
        "where it\nstopped when the same command is given again.\n\n"
        "exit code: 0; 1 if a size failed (the report has the others); 2 for wrong use.\n\n"
        "example: tfdist scale --replicas=1,2 --out=runs/scale -- scripts/train.py --model=digits_cnn --data=digits",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--replicas", metavar="LIST", required=True, help="sizes, such as 1,2,4")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the runs and of the report")
    parser.add_argument("--modes", metavar="LIST", default="strong,weak", help="default: strong,weak")
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="times that each run is made (default: 3)")
    parser.add_argument("--predict", metavar="LIST", help="sizes to predict (default: 2 and 4 times the largest)")
    parser.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="starts SCRIPT with {replicas} workers, such as 'srun --ntasks={replicas} python'",
    )
    parser.add_argument("--oversubscribe", action="store_true", help="let more replicas than cores share them")
    parser.add_argument("--timeout", metavar="S", type=float, default=1800.0, help="seconds for a run (default: 1800)")
    return parser
