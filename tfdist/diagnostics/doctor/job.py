"""The workers of `tfdist doctor` together: they join worker 0, which asks them one question after another.

Each worker listens on its own address of the job, as it will in training. The others connect to worker 0 and keep that
connection for its questions; connections between all of them are made only to be measured. Nobody waits without end: a
worker that does not come, or goes away, is one failed check, and the rest goes on with those that are there.
"""

import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tfdist.cluster.base import Cluster
from tfdist.cluster.messages import Hello, find_conflict
from tfdist.diagnostics.doctor.report import Finding, Report
from tfdist.diagnostics.doctor.team import Team
from tfdist.diagnostics.doctor.wire import PROTOCOL, Channel, Server
from tfdist.diagnostics.doctor.worker import Options, Worker
from tfdist.errors import PeerError

_SPARE_CONNECTIONS = 64
_WELCOME_S = 10.0
_CLOSE_S = 2.0
_IDLE_S = 900.0
"""How long worker 0 may have no question for a worker. Where it ends, its connection ends at once."""


def examine(cluster: Cluster, options: Options, publish: Callable[[Report], None]) -> Report:
    """Examines the job; every worker calls this.

    Args:
        cluster: the job, and which worker this is.
        options: what was told.
        publish: takes the report on the worker that wrote it, before the other workers end.

    Returns:
        The report, the same on all workers that were there to the end.

    Raises:
        UsageError: this worker's address cannot be used.
    """
    worker = Worker(cluster, options)
    with ExitStack() as stack:
        stack.callback(worker.sweep)
        if cluster.num_workers == 1:
            report = Team(cluster, options, worker, {}).examine([])
            publish(report)
            return report
        most = 2 * cluster.num_workers + _SPARE_CONNECTIONS
        server = stack.enter_context(Server(cluster, most, options.timeout_s))
        if cluster.is_chief:
            return _lead(cluster, options, worker, server, publish)
        try:
            return _follow(cluster, options, worker)
        except PeerError as error:
            fix = "Look at the output of worker 0, and check that all workers have the same list of workers."
            report = Report(cluster.workers, (Finding.failed("workers", str(error), fix),), author=cluster.index)
            publish(report)
            return report


def _lead(
    cluster: Cluster, options: Options, worker: Worker, server: Server, publish: Callable[[Report], None]
) -> Report:
    channels, troubles = _gather_workers(cluster, options, server)
    try:
        team = Team(cluster, options, worker, channels)
        report = team.examine(troubles)
        worker.sweep()
        publish(report)
        for channel in channels.values():
            _say_done(channel, report)
        deadline = time.monotonic() + _CLOSE_S
        for channel in channels.values():
            _await_end(channel, deadline)  # the side that closes first keeps the port busy for a while
        return report
    finally:
        for channel in channels.values():
            channel.close()


def _gather_workers(cluster: Cluster, options: Options, server: Server) -> tuple[dict[int, Channel], list[str]]:
    """Waits for the other workers; returns the connections of those that came, and what is wrong."""
    own = Hello(0, cluster.workers, None, options.timeout_s, options.timeout_s, {})
    hellos, channels = [own], {}
    refused: list[int] = []
    deadline = time.monotonic() + options.timeout_s
    while len(channels) + len(refused) < cluster.num_workers - 1 and (left := deadline - time.monotonic()) > 0:
        try:
            message, channel = server.joined.get(timeout=left)
        except queue.Empty:
            break
        hello = _hello(message)
        if hello is None:  # no worker says that
            channel.close()
            continue
        try:
            channel.send({"op": "welcome"}, _WELCOME_S)
        except PeerError:
            continue  # it may come again
        hellos.append(hello)
        conflict = find_conflict([own, hello])
        if conflict is None and hello.index in channels:
            conflict = find_conflict(hellos)
        if conflict is None:
            channels[hello.index] = channel
        else:
            refused.append(hello.index)
            _say_done(channel, Report(cluster.workers, (Finding.failed("workers", conflict, "Start the job anew."),)))
            channel.close()
    troubles = [
        f"worker {index} ({cluster.workers[index]}) did not come up within {options.timeout_s:g} s"
        for index in range(1, cluster.num_workers)
        if index not in channels and index not in refused
    ]
    conflict = find_conflict(hellos)
    return channels, ([conflict] if conflict else []) + troubles


def _hello(message: dict[str, Any]) -> "Hello | None":
    index, workers = message.get("index"), message.get("workers")
    if not isinstance(index, int) or not isinstance(workers, list) or not 0 <= index < len(workers):
        return None
    return Hello(index, tuple(map(str, workers)), None, 0.0, 0.0, {})


def _say_done(channel: Channel, report: Report) -> None:
    try:
        channel.send({"op": "done", "report": report.to_json()}, _CLOSE_S)
    except PeerError:
        pass  # it has gone, and the report says so


def _await_end(channel: Channel, deadline: float) -> None:
    try:
        channel.receive(max(0.001, deadline - time.monotonic()))
    except PeerError:
        pass  # it has closed, as it should, or takes too long


def _follow(cluster: Cluster, options: Options, worker: Worker) -> Report:
    """Answers worker 0 until it says that all is done."""
    with _join(cluster, options) as channel:
        while True:
            request = channel.receive(_IDLE_S)
            if request.get("op") == "done":
                try:
                    return Report.from_json(request["report"])
                except (KeyError, TypeError, ValueError):
                    raise PeerError("worker 0 sent a report of another version of tfdist") from None
            channel.send(worker.answer(request), options.timeout_s)


def _join(cluster: Cluster, options: Options) -> Channel:
    """Connects to worker 0, again and again until it answers or time is up."""
    name = f"worker 0 ({cluster.workers[0]})"
    hello = {"protocol": PROTOCOL, "op": "join", "index": cluster.index, "workers": list(cluster.workers)}
    deadline = time.monotonic() + options.timeout_s
    trouble: PeerError | None = None
    while (left := deadline - time.monotonic()) > 0:
        channel: Channel | None = None
        try:
            channel = Channel.to(cluster.workers[0], name, min(left, _WELCOME_S))
            if channel.ask(hello, min(left, _WELCOME_S)).get("op") == "welcome":
                return channel
        except PeerError as error:
            trouble = error
        if channel is not None:
            channel.close()
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
    raise PeerError(f"{name} did not come up within {options.timeout_s:g} s (last: {trouble or 'no answer'})")
