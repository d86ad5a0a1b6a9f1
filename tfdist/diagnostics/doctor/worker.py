"""What a worker of `tfdist doctor` does when worker 0 asks: look at itself, at the others, and at the files."""

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from tfdist.cluster.address import shorten
from tfdist.cluster.base import Cluster
from tfdist.diagnostics.doctor.data import Contents, contents
from tfdist.diagnostics.doctor.facts import gather
from tfdist.diagnostics.doctor.files import Marks
from tfdist.diagnostics.doctor.links import measure, reach
from tfdist.errors import PeerError

_FOLDER_S = 5.0
"""How long a shared disk may take to show one machine what another has made."""


@dataclass(frozen=True)
class Options:
    """What the doctor was told.

    Attributes:
        checkpoint_dir: the folder to check; empty for none.
        data: the data to check; empty for none.
        timeout_s: how long to wait for the other workers, at each step.
    """

    checkpoint_dir: str = ""
    data: str = ""
    timeout_s: float = 30.0


class Worker:
    """This worker.

    Args:
        cluster: the job, and which worker this is.
        options: what it was told.
    """

    def __init__(self, cluster: Cluster, options: Options):
        self._cluster = cluster
        self._options = options
        self._marks: Marks | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what worker 0 asks for.

        Args:
            request: its "op" says what; see the methods below.

        Returns:
            What JSON can hold.

        Raises:
            PeerError: there is no such request.
        """
        match request.get("op"):
            case "facts":
                return gather(self._options.checkpoint_dir or os.getcwd()).to_json()
            case "reach":
                return {str(index): why for index, why in reach(self._cluster).items()}
            case "measure":
                return self._measure(request.get("target"))
            case "mark":
                return self._mark(request.get("token"))
            case "seen":
                return {"seen": self._marks.seen() if self._marks else []}
            case "sweep":
                self.sweep()
                return {}
            case "data":
                spec = self._options.data
                return {"spec": spec, **asdict(contents(spec) if spec else Contents("none"))}
        raise PeerError(f"worker 0 asks for {shorten(request.get('op'), 50)}; is its tfdist another version?")

    def sweep(self) -> None:
        """Removes what this worker left in the checkpoint folder; worker 0, what anybody left."""
        if self._marks is not None:
            self._marks.sweep(everyone=self._cluster.is_chief)

    def _measure(self, target: Any) -> dict[str, Any]:
        try:
            return asdict(measure(self._cluster, int(target)))
        except PeerError as error:
            return {"error": str(error)}

    def _mark(self, token: Any) -> dict[str, Any]:
        folder = self._options.checkpoint_dir
        if not folder or not isinstance(token, str) or not token.isalnum():
            return {"folder": folder, "error": ""}
        self._marks = Marks(folder, self._cluster.index, token)
        deadline = time.monotonic() + _FOLDER_S
        while True:
            try:
                self._marks.write(make_folder=self._cluster.is_chief)
                return {"folder": folder, "error": ""}
            except FileNotFoundError as error:  # worker 0 has made it, if it is shared
                if self._cluster.is_chief:
                    return {"folder": folder, "error": f"{folder} cannot be made: {error.strerror}"}
                if time.monotonic() > deadline:
                    return {"folder": folder, "error": f"there is no folder {folder} ({error.strerror})"}
            except OSError as error:
                return {"folder": folder, "error": f"{folder} cannot be written: {error.strerror or error}"}
            time.sleep(0.1)
