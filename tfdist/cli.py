"""The `tfdist` command. It imports TensorFlow only in the subcommands that need it."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from tfdist.command import OptionParser, as_typed
from tfdist.errors import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_USE, PeerError, UsageError


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        summary: One line for `tfdist --help`.
        run: Takes the arguments after the subcommand's name, returns the exit code.
    """

    summary: str
    run: Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `tfdist` command.

    Args:
        argv: The arguments; None for those of this process.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong use; 75 where a job was asked to stop and has saved all; 128 plus
        the signal's number where a signal ended it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except UsageError as error:
        print(f"tfdist: error: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except PeerError as error:
        print(f"tfdist: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130  # as shells say of a process that SIGINT ended
    finally:
        _flush_stdout()


def _run(arguments: list[str]) -> int:
    parser = OptionParser(
        allow_abbrev=False,
        prog="tfdist",
        usage="tfdist [-h] [--version] COMMAND [ARGS...]",
        description="Trains Keras 3 models on many devices and machines with the numbers of one device.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
        + "\n\n'tfdist COMMAND --help' says more about one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    if arguments and not arguments[0].startswith("-"):
        name = arguments[0]
        if name not in COMMANDS:
            raise UsageError(f"there is no command {name!r}; the commands are {', '.join(COMMANDS)}")
        return COMMANDS[name].run(arguments[1:])
    try:
        options = parser.parse_args(arguments)
    except SystemExit:  # --help was printed
        return EXIT_DONE
    if not options.version:
        raise UsageError(f"a command is missing; the commands are {', '.join(COMMANDS)} ('tfdist --help' says more)")
    print(f"tfdist {_version()}")
    return EXIT_DONE


_WITH_DEFAULTS = ("max_restarts", "restart_window", "hang_timeout")
"""Options of `tfdist launch` that are None where they are not given; what `launch` takes then is in their help."""


def _launch(arguments: list[str]) -> int:
    from tfdist.launch import render
    from tfdist.launch.hosts import Hosts, environment_options
    from tfdist.launch.local import launch

    parser = OptionParser(
        allow_abbrev=False,
        prog="tfdist launch",
        usage="tfdist launch {--workers=N | --hosts=H1,H2} [--max_restarts=K] [OPTIONS...] SCRIPT [ARGS...]\n"
        "       tfdist launch --render=SYSTEM --workers=N [--render_to=FILE] SCRIPT [ARGS...]",
        description="Runs a Python script in N worker processes on this machine, or on hosts that ssh reaches, with\n"
        "TF_CONFIG set for each. Everything after SCRIPT goes to the script as it is.",
        epilog="What a worker prints comes out with '[worker 1] ' before each line. When a worker fails the "
        "others\nare ended, and the last lines of the one that failed first are printed last. Ctrl-C and "
        "SIGTERM are passed\non to all workers; a second one kills them.\n\n"
        "With --max_restarts, a job that failed is started again, and goes on at its newest checkpoint.\n\n"
        "exit code: 0 if all workers exited with 0; 2 if the first that failed exited with 2 (wrong use); 75 if\n"
        "the workers were asked to stop and saved all; 128 plus the signal's number if a signal ended the job; "
        "else 1.\n\n"
        "example: tfdist launch --workers=2 scripts/train.py --strategy=multi_worker --model=digits_cnn",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", metavar="N", type=int, help="how many worker processes, from 1")
    parser.add_argument(
        "--hosts",
        metavar="H1,H2",
        help="run the workers on these hosts instead, through ssh and in the same working directory; H1:2 runs two "
        "on H1",
    )
    parser.add_argument("--rsh", metavar="COMMAND", help="instead of ssh; a host and a command are appended")
    parser.add_argument("--python", metavar="PATH", help="Python on the hosts (default: that of this command)")
    parser.add_argument("--address", metavar="IP", help="where the hosts reach this machine (default: found out)")
    parser.add_argument(
        "--start_timeout", metavar="SECONDS", type=float, help="how long a host may not answer (default: 30)"
    )
    parser.add_argument(
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        help="an environment variable for the workers; may be given again. Workers on hosts get PYTHONPATH and what "
        "begins with TFDIST_, TF_, NCCL_, KERAS_, OMP_ or XLA_ by themselves, no secrets, and nothing else. With "
        "--render it is written into the job file",
    )
    parser.add_argument(
        "--mpi",
        action="store_true",
        help="make the workers one MPI job as well, for --transport=mpi (needs tfdist[mpi])",
    )
    parser.add_argument("--pin", metavar="CORES", type=int, help="give each worker so many cores of its own")
    parser.add_argument(
        "--log_dir",
        metavar="DIR",
        help="a folder for the whole output of each worker: DIR/worker-0.log and so on",
    )
    parser.add_argument(
        "--start_port",
        metavar="PORT",
        type=int,
        help="worker i gets PORT + i (default: free ports are picked)",
    )
    parser.add_argument(
        "--max_restarts",
        metavar="K",
        type=int,
        help="start the job again after a failure, at most K times without progress between (default: 0)",
    )
    parser.add_argument(
        "--min_workers",
        metavar="M",
        type=int,
        help="go on with so many workers where others fail again and again (default: all)",
    )
    parser.add_argument(
        "--health_check",
        metavar="COMMAND",
        help="exit code 0 of it says that worker place $TFDIST_PLACE on $TFDIST_HOST is well (default: it is)",
    )
    parser.add_argument(
        "--restart_window",
        metavar="SECONDS",
        type=float,
        help="restarts that are longer ago do not count (default: 3600)",
    )
    parser.add_argument(
        "--hang_timeout",
        metavar="SECONDS",
        type=float,
        help="a worker that is silent, or whose step does not move, for so long has failed (default: 30)",
    )
    render.add_options(parser)
    first = _end_of_options(arguments)
    try:
        options = parser.parse_args(arguments[:first])
    except SystemExit:
        return EXIT_DONE
    command = arguments[first:]
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise UsageError("SCRIPT is missing: tfdist launch --workers=N SCRIPT [ARGS...]")
    if options.workers is None and options.hosts is None:
        raise UsageError("--workers=N is missing: how many workers there are; or --hosts=H1,H2")
    if render.wants(options):
        return render.main(options, command)
    of_hosts = {name: getattr(options, name) for name in ("rsh", "python", "address", "start_timeout")}
    if options.hosts is not None:
        hosts = Hosts.parse(options.hosts, **of_hosts)
    else:
        hosts = None
        for name, value in of_hosts.items():
            if value is not None:
                raise UsageError(
                    f"{as_typed(name, value)} is for workers on other hosts; give --hosts too, or leave it out"
                )
    return launch(
        hosts.workers if hosts is not None and options.workers is None else options.workers,
        command,
        mpi=options.mpi,
        pin=options.pin,
        log_dir=options.log_dir,
        start_port=options.start_port,
        min_workers=options.min_workers,
        health_check=options.health_check,
        hosts=hosts,
        env=environment_options(options.env or []),
        **{name: value for name in _WITH_DEFAULTS if (value := getattr(options, name)) is not None},
    )


def _end_of_options(arguments: list[str]) -> int:
    """Returns where SCRIPT (or a '--' before it) stands; every option but these takes a value."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "--":
        takes_next = "=" not in arguments[place] and arguments[place] not in ("-h", "--help", "--mpi")
        place += 2 if takes_next else 1
    return min(place, len(arguments))


def _verify(arguments: list[str]) -> int:
    from tfdist.diagnostics.verify import main as verify

    return verify(arguments)


def _scale(arguments: list[str]) -> int:
    from tfdist.scaling.command import main as scale

    return scale(arguments)


def _report(arguments: list[str]) -> int:
    from tfdist.scaling.compare import main as report

    return report(arguments)


def _bench(arguments: list[str]) -> int:
    from tfdist.diagnostics.bench import main as bench

    return bench(arguments)


def _env(arguments: list[str]) -> int:
    from tfdist.diagnostics.env import main as env

    return env(arguments)


def _doctor(arguments: list[str]) -> int:
    from tfdist.diagnostics.doctor.command import main as doctor

    return doctor(arguments)


COMMANDS: dict[str, Command] = {
    "launch": Command("start a script in several worker processes, here or on other hosts", _launch),
    "env": Command("print versions, devices and the job, for a bug report", _env),
    "doctor": Command("check machines, network and files before a long job", _doctor),
    "verify": Command("check on this machine that every strategy gives the numbers of one device", _verify),
    "scale": Command("train at several sizes, and report how it scales and why not better", _scale),
    "report": Command("report on runs that exist already", _report),
    "bench": Command("time all-reduces between worker processes on this machine", _bench),
}


def _version() -> str:
    try:
        return version("tfdist")
    except PackageNotFoundError:
        return "(not installed)"


def _flush_stdout() -> None:
    """Keeps Python from reporting, at its end, that nobody reads the standard output any more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
