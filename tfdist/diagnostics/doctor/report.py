"""What `tfdist doctor` finds: one line for each check, and the report of all."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tfdist.cluster.address import cut

_LONGEST = 400


class Status(str, enum.Enum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        check: its name.
        status: how it came out.
        found: what was found.
        fix: what to do about it, in one sentence; empty where nothing is to be done.
    """

    check: str
    status: Status
    found: str
    fix: str = ""

    @classmethod
    def ok(cls, check: str, found: str) -> "Finding":
        """Returns a check with nothing to complain of."""
        return cls(check, Status.OK, found)

    @classmethod
    def skipped(cls, check: str, why: str) -> "Finding":
        """Returns a check that was not made."""
        return cls(check, Status.SKIPPED, why)

    @classmethod
    def warning(cls, check: str, found: str, fix: str) -> "Finding":
        """Returns a check after which the job can run, but perhaps not well."""
        return cls(check, Status.WARNING, found, fix)

    @classmethod
    def failed(cls, check: str, found: str, fix: str) -> "Finding":
        """Returns a check after which the job cannot run, or not correctly."""
        return cls(check, Status.FAILED, found, fix)


@dataclass(frozen=True)
class Link:
    """What the way from one worker to another can do.

    Attributes:
        source: the worker that sends.
        target: the worker that receives.
        latency_ms: shortest round trip of a small message.
        mb_per_s: 10^6 bytes in a second.
    """

    source: int
    target: int
    latency_ms: float
    mb_per_s: float


@dataclass(frozen=True)
class Report:
    """All checks of a job.

    Attributes:
        workers: their addresses.
        findings: the checks, in the order in which they were made.
        links: what was measured between workers.
        author: the worker that wrote it: worker 0, or one that did not find worker 0.
    """

    workers: tuple[str, ...]
    findings: tuple[Finding, ...]
    links: tuple[Link, ...] = ()
    author: int = 0

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(finding.status is Status.FAILED for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns what --json writes."""
        return {"ok": not self.failed, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Report":
        """Reads what `to_json` returned."""
        findings = tuple(Finding(**{**line, "status": Status(line["status"])}) for line in data["findings"])
        return cls(tuple(data["workers"]), findings, tuple(Link(**link) for link in data["links"]), data["author"])


def sides(values: Mapping[int, Any]) -> str:
    """Says which workers hold which value, such as "workers 0, 2: a; worker 1: b"."""
    holders: dict[str, list[int]] = {}
    for index in sorted(values):
        holders.setdefault(str(values[index]), []).append(index)
    return cut("; ".join(f"{workers(indexes)}: {value}" for value, indexes in holders.items()), _LONGEST)


def workers(indexes: Iterable[int]) -> str:
    """Names workers, such as "worker 1", "workers 0, 2" or "workers 0-7, 9"."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"worker{'s' if sum(map(len, runs)) > 1 else ''} {cut(', '.join(names), 100)}"


def joined(parts: Iterable[str]) -> str:
    """Joins parts of a message, and cuts it where it gets too long."""
    return cut("; ".join(parts), _LONGEST)
