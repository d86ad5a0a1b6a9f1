"""The files of a job: one checkpoint folder for all workers, and the same data on each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.diagnostics.doctor.report import Finding, joined, sides, workers

_PREFIX = ".tfdist-doctor-"


@dataclass
class Marks:
    """This worker's part of the check of the checkpoint folder: it leaves a file there and looks for the others'.

    Attributes:
        folder: the folder.
        index: this worker.
        token: the name of this run, the same for all workers.
        made: folders that this worker had to make.
    """

    folder: str
    index: int
    token: str
    made: list[Path] = field(default_factory=list)

    def write(self, *, make_folder: bool) -> None:
        """Leaves this worker's file.

        Args:
            make_folder: make the folder where it is missing, as training does.

        Raises:
            OSError: it cannot be done.
        """
        folder = Path(self.folder).absolute()
        if make_folder:
            missing = [place for place in (folder, *folder.parents) if not place.exists()]
            for place in reversed(missing):
                place.mkdir()
                self.made.append(place)
        with open(folder / f"{_PREFIX}{self.token}-{self.index}", "x", encoding="ascii") as file:
            file.write(self.token)
            file.flush()
            os.fsync(file.fileno())

    def seen(self) -> list[int]:
        """Returns the workers whose files are in the folder, with what belongs in them."""
        indexes = []
        for path in self._files():
            number = path.name.rpartition("-")[2]
            try:
                if number.isdecimal() and path.read_text(encoding="ascii") == self.token:
                    indexes.append(int(number))
            except (OSError, ValueError):
                continue  # just removed, or not yet whole on this machine
        return sorted(indexes)

    def sweep(self, *, everyone: bool = False) -> None:
        """Removes this worker's file, or those of all of this run, and the folders that it made if they are empty."""
        for path in self._files():
            if everyone or path.name.endswith(f"-{self.index}"):
                path.unlink(missing_ok=True)
        while self.made:
            try:
                self.made.pop().rmdir()
            except OSError:
                continue  # somebody has put something there meanwhile

    def _files(self) -> list[Path]:
        try:
            return sorted(Path(self.folder).absolute().glob(f"{_PREFIX}{self.token}-*"))
        except OSError:
            return []


def check_folder(folders: Mapping[int, str], errors: Mapping[int, str], seen: Mapping[int, list[int]]) -> Finding:
    """Judges what the workers saw in the checkpoint folder.

    Args:
        folders: each worker's folder; empty where it was given none.
        errors: why workers could not write.
        seen: for each worker that could write, the workers whose files it sees.
    """
    check = "checkpoint_dir"
    if not any(folders.values()):
        return Finding.skipped(check, "no --checkpoint_dir was given")
    if not all(folders.values()):
        without = [index for index, folder in folders.items() if not folder]
        return Finding.failed(
            check, f"{workers(without)} was given no --checkpoint_dir", "Give every worker the same arguments."
        )
    if errors:
        fix = "Make the folder on a disk that all workers share, and let the job's user write there."
        return Finding.failed(check, sides(errors), fix)
    blind = {index: sorted(set(folders) - set(found)) for index, found in seen.items() if set(folders) - set(found)}
    if blind:
        said = joined(f"worker {index} does not see the file of {workers(unseen)}" for index, unseen in blind.items())
        fix = "Give a folder on a disk that all workers share: each of these has one of its own by that name."
        return Finding.failed(check, f"not the same folder on all workers: {said} ({sides(folders)})", fix)
    if len(folders) == 1:
        return Finding.ok(check, f"{folders[min(folders)]} can be written")
    return Finding.ok(check, f"{sides(folders)}: the same folder, and all {len(folders)} can write there")
