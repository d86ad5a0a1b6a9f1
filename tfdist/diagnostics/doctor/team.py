"""The workers of `tfdist doctor` as worker 0 sees them: it asks one question after another, and judges the answers."""

import secrets
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tfdist.cluster.base import Cluster
from tfdist.diagnostics.doctor.checks import all_checks
from tfdist.diagnostics.doctor.data import Contents, check_data
from tfdist.diagnostics.doctor.facts import Facts
from tfdist.diagnostics.doctor.files import check_folder
from tfdist.diagnostics.doctor.links import check_clocks, check_links, check_ports, pairs, read_clock, slow_links
from tfdist.diagnostics.doctor.report import Finding, Link, Report, joined
from tfdist.diagnostics.doctor.topology import check_collective
from tfdist.diagnostics.doctor.wire import Channel
from tfdist.diagnostics.doctor.worker import Options, Worker
from tfdist.errors import PeerError

_WORK_S = 90.0
"""More time for what is work and not waiting: TensorFlow's import from a slow disk, a look at many files."""
_LINKS_S, _AGAIN_S = 20.0, 5.0
_TIMES_AGAIN = 3
_LINK_S = 30.0
_SEEN_S = 5.0
_MOST_BROKEN = 8


class Team:
    """The workers as worker 0 sees them: itself, and those that joined.

    Args:
        cluster: the job.
        options: what worker 0 was told.
        worker: worker 0 itself.
        channels: the connections of the others.
    """

    def __init__(self, cluster: Cluster, options: Options, worker: Worker, channels: dict[int, Channel]):
        self._cluster = cluster
        self._options = options
        self._worker = worker
        self._channels = dict(channels)
        self._lost: list[str] = []

    def examine(self, troubles: list[str]) -> Report:
        """Makes all checks; `troubles` is what went wrong as the workers joined."""
        facts = self._facts()
        findings = [*all_checks(facts, self._cluster.hosts), check_collective(facts)]
        links: list[Link] = []
        if self._cluster.num_workers > 1:
            reached = self._reached()
            findings += [check_ports(reached, self._cluster.workers), self._clocks(reached)]
            links, finding = self._links(reached)
            findings.append(finding)
        findings += [self._folder(), self._data()]
        return Report(self._cluster.workers, (self._present(troubles), *findings), tuple(links))

    def _present(self, troubles: list[str]) -> Finding:
        count = self._cluster.num_workers
        if not troubles and not self._lost:
            if self._cluster.is_local:
                return Finding.ok("workers", "no cluster in the environment: one worker")
            came = "one worker" if count == 1 else f"all {count} came up"
            return Finding.ok("workers", f"{came} ({self._cluster.source})")
        fix = "Look at the output of these workers, and check that all workers have the same list of workers."
        return Finding.failed("workers", joined([*troubles, *self._lost]), fix)

    def _ask(
        self, request: dict[str, Any], timeout_s: float, indexes: "Iterable[int] | None" = None
    ) -> dict[int, dict[str, Any]]:
        """Asks workers at once, all that are there or some; returns the answers by worker."""
        chosen = set(self._channels) | {0} if indexes is None else set(indexes) & (set(self._channels) | {0})
        deadline = time.monotonic() + timeout_s
        for index in sorted(chosen - {0}):
            try:
                self._channels[index].send(request, timeout_s)
            except PeerError as error:
                self._lose(index, request, error)
        answers = {0: self._worker.answer(request)} if 0 in chosen else {}
        for index in sorted(chosen & set(self._channels)):
            try:
                answers[index] = self._channels[index].receive(max(1.0, deadline - time.monotonic()))
            except PeerError as error:
                self._lose(index, request, error)
        return answers

    def _lose(self, index: int, request: dict[str, Any], error: Exception) -> None:
        channel = self._channels.pop(index)
        channel.close()
        text = str(error).replace("the other end", f"worker {index} ({self._cluster.workers[index]})")
        self._lost.append(f"{text} (asked for '{request['op']}')")

    def _facts(self) -> dict[int, Facts]:
        request = {"op": "facts"}
        facts = {}
        for index, answer in self._ask(request, self._options.timeout_s + _WORK_S).items():
            try:
                facts[index] = Facts.from_json(answer, f"worker {index}")
            except PeerError as error:
                self._lose(index, request, error)
        return facts

    def _reached(self) -> dict[int, dict[int, str]]:
        answers = self._ask({"op": "reach"}, self._options.timeout_s + self._cluster.num_workers)
        return {index: {int(other): str(why) for other, why in answer.items()} for index, answer in answers.items()}

    def _clocks(self, reached: dict[int, dict[int, str]]) -> Finding:
        clocks = {}
        for index in sorted(self._channels):
            try:
                if not reached[0].get(index):
                    clocks[index] = read_clock(self._cluster, index)[0]
            except PeerError:
                continue  # the check of the links says so
        return check_clocks(clocks)

    def _links(self, reached: dict[int, dict[int, str]]) -> tuple[list[Link], Finding]:
        """Measures one link after another, so that they do not disturb each other."""
        wanted = [(i, j) for i, j in pairs(sorted(reached)) if j in reached and not reached[i].get(j)]
        links: dict[tuple[int, int], Link] = {}
        broken: list[str] = []
        deadline = time.monotonic() + _LINKS_S
        for source, target in wanted:
            if time.monotonic() > deadline or len(broken) > _MOST_BROKEN:
                break
            link = self._measured(source, target)
            if isinstance(link, str):
                broken.append(link)
            elif link is not None:
                links[source, target] = link
        deadline += _AGAIN_S
        for _ in range(_TIMES_AGAIN):  # it may have been a moment's disturbance
            for slow in sorted(slow_links(list(links.values())), key=lambda link: link.mb_per_s):
                again = self._measured(slow.source, slow.target) if time.monotonic() < deadline else None
                if isinstance(again, Link):
                    links[slow.source, slow.target] = replace(
                        slow,
                        latency_ms=min(slow.latency_ms, again.latency_ms),
                        mb_per_s=max(slow.mb_per_s, again.mb_per_s),
                    )
        found = list(links.values())
        return found, check_links(found, broken, len(wanted))

    def _measured(self, source: int, target: int) -> "Link | str | None":
        """Returns the link, or why it cannot be measured; None where the source has gone."""
        answer = self._ask({"op": "measure", "target": target}, _LINK_S, [source]).get(source)
        if answer is None:
            return None
        try:
            return f"worker {source}: {answer['error']}" if "error" in answer else Link(**answer)
        except TypeError:
            return f"worker {source} told of a link what cannot be read"

    def _folder(self) -> Finding:
        """Lets every worker leave a file in the checkpoint folder, worker 0 first, which may have to make it."""
        request = {"op": "mark", "token": secrets.token_hex(8)}
        wait = self._options.timeout_s + _SEEN_S
        marked = {**self._ask(request, wait, [0]), **self._ask(request, wait, list(self._channels))}
        folders = {index: str(answer.get("folder", "")) for index, answer in marked.items()}
        errors = {index: str(answer["error"]) for index, answer in marked.items() if answer.get("error")}
        seen: dict[int, list[int]] = {}
        deadline = time.monotonic() + _SEEN_S
        while all(folders.values()) and not errors:
            seen = {i: list(answer.get("seen", ())) for i, answer in self._ask({"op": "seen"}, wait).items()}
            if time.monotonic() > deadline or all(set(folders) <= set(found) for found in seen.values()):
                break
            time.sleep(0.2)
        self._ask({"op": "sweep"}, wait, list(self._channels))
        self._worker.sweep()  # last, as it removes the folder if it has made it
        return check_folder(folders, errors, seen)

    def _data(self) -> Finding:
        request = {"op": "data"}
        specs, found = {}, {}
        for index, answer in self._ask(request, self._options.timeout_s + _WORK_S).items():
            try:
                found[index] = Contents.from_json(answer, f"worker {index}")
                specs[index] = str(answer.get("spec", ""))
            except PeerError as error:
                self._lose(index, request, error)
        return check_data(specs, found)
