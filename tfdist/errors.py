"""The three kinds of failure that tfdist reports, and the exit codes."""

import sys
from types import TracebackType

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_REQUEUE = 75
"""Asked to stop, with everything saved: start the job again and it goes on. EX_TEMPFAIL of sysexits.h."""


class UsageError(ValueError):
    """Wrong use: a flag, an argument, an environment variable or a file that cannot be right.

    Raised before any device or network is touched. The message names the argument, its value, what is
    allowed and, where there is one, the fix. Entry points print it without a traceback and exit with
    `EXIT_WRONG_USE`.
    """


class SaveError(RuntimeError):
    """A checkpoint, or a run's figures, could not be written; the message says where and why."""


class PeerError(RuntimeError):
    """Another worker did not come up, disagreed, or went away; the message names it."""


def exit_2_on_wrong_use() -> None:
    """Lets a UsageError that nobody catches end this process with `EXIT_WRONG_USE`, so that nothing starts it again.

    It is shown as it would be otherwise.
    """
    shown = sys.excepthook
    if getattr(shown, "of_tfdist", False):
        return

    def show(kind: type[BaseException], error: BaseException, traceback: "TracebackType | None") -> None:
        shown(kind, error, traceback)
        if isinstance(error, UsageError):
            raise SystemExit(EXIT_WRONG_USE)

    show.of_tfdist = True
    sys.excepthook = show
