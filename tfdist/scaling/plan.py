"""Which runs a sweep is made of, and in which order."""

import dataclasses
import json
import os
from pathlib import Path

from tfdist.errors import UsageError
from tfdist.files import write_whole

MODES = ("strong", "weak")
_PLAN_FILE = "plan.json"


@dataclasses.dataclass(frozen=True, order=True)
class Trial:
    """One run of the training.

    Attributes:
        repeat: which repetition, from 0.
        mode: "strong" (the global batch stays) or "weak" (the batch of a replica stays).
        replicas: how many.
        ceiling: whether it runs without communication (`--hook=noop`).
    """

    repeat: int
    mode: str
    replicas: int
    ceiling: bool

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.mode}-{self.replicas}{'-noop' if self.ceiling else ''}-{self.repeat}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sweep.

    Attributes:
        command: the script and its arguments.
        replicas: the sizes, ascending.
        modes: out of MODES.
        repeats: how often each run is repeated.
        launcher: what starts `command` with {replicas} workers in place of tfdist; None for this machine.
    """

    command: tuple[str, ...]
    replicas: tuple[int, ...]
    modes: tuple[str, ...] = MODES
    repeats: int = 3
    launcher: str | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("SCRIPT is missing: tfdist scale --replicas=1,2,4 --out=DIR -- SCRIPT ARGS")
        if self.launcher is not None and "{replicas}" not in self.launcher:
            raise UsageError(
                f"--launcher={self.launcher!r} does not say how many workers to start: put {{replicas}} where the "
                "number belongs, such as --launcher='srun --ntasks={replicas} python'"
            )
        for flag in ("--log_dir", "--checkpoint_dir", "--summary_json"):
            if any(argument.split("=")[0] in (flag, flag[1:]) for argument in self.command):
                raise UsageError(f"{flag} in the command: the runs of a sweep must not share it; leave it out")

    def trials(self) -> list[Trial]:
        """Returns all runs, interleaved: a machine that slows down with time slows all sizes alike.

        At the smallest size strong and weak scaling are the same, and one replica has nothing to communicate.
        """
        trials = []
        for repeat in range(self.repeats):
            round_ = []
            for replicas in self.replicas:
                for mode in self.modes if replicas > self.replicas[0] else self.modes[:1]:
                    round_.append(Trial(repeat, mode, replicas, False))
                    if replicas > 1:
                        round_.append(Trial(repeat, mode, replicas, True))
            # Every other round backwards; the first begins with the smallest size, which says what the batch is.
            trials += round_ if repeat % 2 == 0 else round_[::-1]
        return trials

    def keep_in(self, folder: "str | os.PathLike[str]") -> None:
        """Writes the plan into `folder`, or checks that it is the one which lies there.

        Raises:
            UsageError: another sweep, or something else, is in the folder.
        """
        folder = Path(folder)
        path = folder / _PLAN_FILE
        own = {"command": list(self.command), "launcher": self.launcher}
        if path.is_file():
            try:
                there = json.loads(path.read_text(encoding="utf8"))
            except ValueError:
                there = None
            if there != own:
                raise UsageError(
                    f"--out={folder}: there is a sweep of another command in it "
                    f"({' '.join((there or {}).get('command', ['unreadable']))}); nothing was overwritten, "
                    "give another folder"
                )
            return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"--out={folder}: a new or empty folder is needed, or one of an earlier sweep of the same command; "
                "nothing was overwritten"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(own, indent=1))


def parse_replicas(text: str) -> tuple[int, ...]:
    """Returns the sizes in a text such as 1,2,4, ascending.

    Raises:
        UsageError: it is no such list.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise UsageError(f"--replicas={text}: numbers from 1 are needed, with commas between them: --replicas=1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def parse_modes(text: str) -> tuple[str, ...]:
    """Returns the modes in a text such as strong,weak.

    Raises:
        UsageError: it is no such list.
    """
    names = text.split(",")
    for name in names:
        if name not in MODES:
            raise UsageError(f"--modes={text}: choose out of {' and '.join(MODES)}, with a comma between them")
    return tuple(mode for mode in MODES if mode in names)
