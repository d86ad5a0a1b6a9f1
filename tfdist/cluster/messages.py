"""What workers say to each other in a rendezvous, one JSON line each way, and how the chief judges it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

from tfdist.cluster.address import cut, group_by_host
from tfdist.cluster.gpus import NO_GPUS, SeenGPUs, find_shortage, sharing
from tfdist.errors import PeerError, UsageError

MAX_LINE_BYTES = 1 << 20
"""The longest line that either side reads; about 30,000 workers."""

_PROTOCOL = "tfdist-rendezvous-2"
_PACKAGES = ("tensorflow", "keras", "tfdist")


def installed_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Returns versions, by default those that all workers must share, without importing the packages."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@dataclass(frozen=True)
class Hello:
    """A worker introduces itself to worker 0.

    Attributes:
        index: Which worker it is, by its own list.
        workers: Its own list of workers.
        seed: The seed it was given; None if it takes any.
        timeout_s: How long it waits for the others in all.
        left_s: How much of that is left.
        versions: The versions it runs, by package.
        monitor: Where the workers hear of each other while they train; worker 0 may say so.
        gpus: The GPUs it sees.
    """

    index: int
    workers: tuple[str, ...]
    seed: int | None
    timeout_s: float
    left_s: float
    versions: dict[str, str] = field(default_factory=installed_versions)
    monitor: str | None = None
    gpus: SeenGPUs = NO_GPUS

    def to_line(self) -> bytes:
        """Returns the line to send."""
        return _to_line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> "Hello | None":
        """Reads a line from the network.

        Args:
            line: What a connection sent first.

        Returns:
            The hello, or None if the line is not from a tfdist worker.
        """
        data = _from_line(line)
        if data is None:
            return None
        index, workers, seed = data.get("index"), data.get("workers"), data.get("seed")
        times, versions = (data.get("timeout_s"), data.get("left_s")), data.get("versions")
        monitor = data.get("monitor")
        gpus = _seen_gpus(data.get("gpus", asdict(NO_GPUS)))  # another release may say nothing of them
        well_formed = (
            _is_int(index)
            and isinstance(workers, list)
            and all(isinstance(worker, str) for worker in workers)
            and 0 <= index < len(workers)
            and (seed is None or _is_int(seed))
            and all(isinstance(time, int | float) and 0 <= time < sys.maxsize for time in times)
            and isinstance(versions, dict)
            and all(isinstance(value, str) for value in versions.values())
            and (monitor is None or isinstance(monitor, str))
            and gpus is not None
        )
        return cls(index, tuple(workers), seed, *times, versions, monitor, gpus) if well_formed else None


@dataclass(frozen=True)
class Reply:
    """Worker 0's answer, the same for every worker: an agreed seed, or the error that all of them raise.

    Attributes:
        seed: The agreed seed; None if there is an error.
        usage_error: The message, if the job was started wrongly.
        peer_error: The message, if a worker did not come up.
        monitor: Where the workers hear of each other while they train, if worker 0 says so.
        sharing_gpus: The workers that divide the GPUs of their host.
    """

    seed: int | None = None
    usage_error: str | None = None
    peer_error: str | None = None
    monitor: str | None = None
    sharing_gpus: tuple[int, ...] = ()

    def to_line(self) -> bytes:
        """Returns the line to send."""
        return _to_line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> "Reply | None":
        """Reads a line from the network.

        Args:
            line: What came back on a worker's connection to worker 0.

        Returns:
            The reply, or None if the line is not from a tfdist worker.
        """
        data = _from_line(line)
        if data is None:
            return None
        seed, errors = data.get("seed"), (data.get("usage_error"), data.get("peer_error"))
        texts = (*errors, data.get("monitor"))
        if not all(text is None or isinstance(text, str) for text in texts):
            return None
        if not _is_int(seed) and not any(errors):
            return None
        workers = data.get("sharing_gpus", [])
        if not isinstance(workers, list) or not all(map(_is_int, workers)):
            return None
        return cls(seed, *texts, tuple(workers))

    def agreed_seed(self) -> int:
        """Returns the seed.

        Raises:
            UsageError: If the job was started wrongly.
            PeerError: If a worker did not come up.
        """
        if self.usage_error:
            raise UsageError(self.usage_error)
        if self.peer_error or self.seed is None:
            raise PeerError(self.peer_error or "worker 0 gave no seed")
        return self.seed


def agree(hellos: Sequence[Hello], seed: int) -> Reply:
    """Returns the answer to workers between whom there is no conflict.

    Args:
        hellos: What each worker said, all of them; the first is worker 0.
        seed: The seed of the job.

    Returns:
        The answer.
    """
    shared = sharing(group_by_host(hellos[0].workers), _gpus(hellos))
    return Reply(seed=seed, monitor=hellos[0].monitor, sharing_gpus=shared)


def find_conflict(hellos: Sequence[Hello]) -> str | None:
    """Judges whether the workers that came up can form one job.

    Args:
        hellos: What each worker said; the first is worker 0.

    Returns:
        None if they agree, else what they disagree about, who says what, and the fix.
    """
    if len({hello.workers for hello in hellos}) > 1:
        return _disagreement(
            hellos,
            [cut(", ".join(hello.workers), 400) for hello in hellos],
            "have different lists of workers",
            "Give every worker the same list, in the same order, in TF_CONFIG",
        )
    indexes = [hello.index for hello in hellos]
    for index in sorted(set(indexes)):
        if indexes.count(index) > 1:
            return (
                f"{indexes.count(index)} processes say that they are worker {index} "
                f"({hellos[0].workers[index]}). Give each its own task index in TF_CONFIG, and end processes "
                "left over from an earlier run"
            )
    for package in _PACKAGES:
        versions = [hello.versions.get(package, "unknown")[:50] for hello in hellos]
        if len(set(versions)) > 1:
            fix = f"Install the same version of {package} on every worker"
            return _disagreement(hellos, versions, f"run different versions of {package}", fix)
    seeded = [hello for hello in hellos if hello.seed is not None]
    if len({hello.seed for hello in seeded}) > 1:
        seeds = [str(hello.seed) for hello in seeded]
        return _disagreement(seeded, seeds, "were given different seeds", "Give every worker the same --seed, or none")
    if len(hellos) < len(hellos[0].workers):
        return None  # a host's GPUs are judged when all of its workers have come
    shortage = find_shortage(group_by_host(hellos[0].workers), _gpus(hellos))
    return None if shortage is None else ". ".join(shortage)


def _gpus(hellos: Sequence[Hello]) -> dict[int, SeenGPUs]:
    return {hello.index: hello.gpus for hello in hellos}


def _seen_gpus(data: object) -> SeenGPUs | None:
    if not isinstance(data, dict) or not _is_int(data.get("count")) or not 0 <= data["count"] < sys.maxsize:
        return None
    pool = data.get("pool")
    return SeenGPUs(data["count"], pool) if pool is None or isinstance(pool, str) else None


def _disagreement(hellos: Sequence[Hello], values: Sequence[str], what: str, fix: str) -> str:
    holders: dict[str, list[int]] = {}
    for hello, value in zip(hellos, values, strict=True):
        holders.setdefault(value, []).append(hello.index)
    sides = [
        f"{'workers' if len(indexes) > 1 else 'worker'} {cut(', '.join(map(str, sorted(indexes))), 100)}: {value}"
        for value, indexes in holders.items()
    ]
    return f"the workers {what} ({'; '.join(sides[:8])}). {fix}"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _to_line(data: dict) -> bytes:
    return json.dumps({"protocol": _PROTOCOL, **data}).encode("ascii") + b"\n"


def _from_line(line: bytes) -> dict | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("protocol") == _PROTOCOL else None
