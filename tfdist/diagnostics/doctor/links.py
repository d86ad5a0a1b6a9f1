"""The network between the workers: who reaches whom, how far the clocks are apart, how fast each link is."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tfdist.cluster.base import Cluster
from tfdist.diagnostics.doctor.report import Finding, Link, joined
from tfdist.diagnostics.doctor.wire import MOST_BYTES, PROTOCOL, Channel
from tfdist.errors import PeerError

SKEW_WARNING_S, SKEW_FAILURE_S = 0.1, 1.0
"""A tenth of a second misleads those who compare the workers' logs; a second, whoever asks which file is newer."""
SLOW_LINK = 1 / 3
"""A link is slow below this part of the median bandwidth."""
SLOW_ANSWER, SLOW_ANSWER_MS = 3.0, 1.0
"""A link is slow above so many times the median latency, and so many milliseconds above it."""
_ROUND_TRIPS = 8
_REACH_S = 3.0
_TRANSFER_S = 8.0
_ENOUGH_S = 0.1
_SIZES = (1 << 16, 1 << 19, 1 << 22, MOST_BYTES)
_AT_ONCE = 32
_SHOWN = 6


@dataclass(frozen=True)
class Clock:
    """How far another worker's clock is ahead.

    Attributes:
        offset_s: the best guess; negative where it is behind.
        error_s: the most by which the guess can be wrong.
    """

    offset_s: float
    error_s: float

    @property
    def least_s(self) -> float:
        """The least by which the clocks differ."""
        return max(0.0, abs(self.offset_s) - self.error_s)


def clock(round_trips: Sequence[tuple[float, float, float]]) -> Clock:
    """Compares two clocks by Cristian's algorithm.

    Args:
        round_trips: when a question was sent, what the other clock showed, when the answer came. The shortest round
            trip counts: the other clock was read within it.

    Returns:
        The difference.
    """
    sent, shown, came = min(round_trips, key=lambda times: times[2] - times[0])
    return Clock(shown - (sent + came) / 2, (came - sent) / 2)


def reach(cluster: Cluster) -> dict[int, str]:
    """Connects to every other worker.

    Returns:
        For each of them why it cannot be reached; an empty text where it can.
    """

    def attempt(index: int) -> str:
        try:
            with _channel(cluster, index) as channel:
                answered = channel.ask({"protocol": PROTOCOL, "op": "time"}, _REACH_S).get("index")
            return "" if answered == index else f"worker {answered} answers there"
        except PeerError as error:
            return str(error)

    others = [index for index in range(cluster.num_workers) if index != cluster.index]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(others, pool.map(attempt, others), strict=True))


def read_clock(cluster: Cluster, index: int) -> tuple[Clock, float]:
    """Returns how far another worker's clock is ahead of this one's, and the shortest round trip in seconds.

    Raises:
        PeerError: it does not answer.
    """
    times = []
    with _channel(cluster, index) as channel:
        for _ in range(_ROUND_TRIPS):
            sent, started = time.time(), time.perf_counter()
            shown = channel.ask({"protocol": PROTOCOL, "op": "time"}, _REACH_S).get("time")
            took = time.perf_counter() - started
            if not isinstance(shown, float):
                raise PeerError(f"worker {index} tells no time")
            times.append((sent, shown, sent + took))
    return clock(times), min(came - sent for sent, _, came in times)


def measure(cluster: Cluster, index: int) -> Link:
    """Sends bytes to another worker, more and more until it takes a tenth of a second.

    Raises:
        PeerError: it does not take them.
    """
    rate = 0.0
    _, round_trip_s = read_clock(cluster, index)
    with _channel(cluster, index) as channel:
        for size in _SIZES:
            started = time.perf_counter()
            channel.send({"protocol": PROTOCOL, "op": "take", "bytes": size}, _TRANSFER_S)
            channel.pour(size, _TRANSFER_S)
            channel.receive(_TRANSFER_S)
            took = time.perf_counter() - started
            rate = size / took  # the last one counts: small ones fit into buffers on the way
            if took >= _ENOUGH_S:
                break
    return Link(cluster.index, index, 1e3 * round_trip_s, rate / 1e6)


def pairs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields all ordered pairs, neighbours of the ring first: those an all-reduce uses."""
    count = len(indexes)
    for distance in range(1, count):
        for place in range(count):
            yield indexes[place], indexes[(place + distance) % count]


def check_ports(reached: Mapping[int, Mapping[int, str]], addresses: Sequence[str]) -> Finding:
    """Judges who reaches whom.

    Args:
        reached: for each worker what `reach` returned there.
        addresses: those of all workers.
    """
    ways = [(i, j, why) for i, found in sorted(reached.items()) for j, why in sorted(found.items()) if j in reached]
    blocked = [(i, j, why) for i, j, why in ways if why]
    if not blocked:
        return Finding.ok("ports", f"all {len(ways)} ways between {len(reached)} workers are open")
    said = [f"worker {i} to worker {j} ({addresses[j]}): {why}" for i, j, why in blocked[:_SHOWN]]
    rest = [f"and {len(blocked) - _SHOWN} more"] if len(blocked) > _SHOWN else []
    return Finding.failed(
        "ports",
        joined(said + rest),
        "Open these ports between the machines in both directions (firewall, security group, container network), and "
        "give addresses that all workers can route to.",
    )


def check_clocks(clocks: Mapping[int, Clock]) -> Finding:
    """Judges how far the workers' clocks are from worker 0's."""
    if not clocks:
        return Finding.skipped("clocks", "there is no other worker to compare with")
    worst = max(clocks, key=lambda index: clocks[index].least_s)
    far = {index: found for index, found in clocks.items() if found.least_s > SKEW_WARNING_S}
    if not far:
        found = clocks[worst]
        return Finding.ok("clocks", f"within {1e3 * (abs(found.offset_s) + found.error_s):.3g} ms of worker 0's")
    said = joined(
        f"worker {index} is {abs(found.offset_s):.3g} s {'ahead of' if found.offset_s > 0 else 'behind'} worker 0"
        for index, found in sorted(far.items())
    )
    fix = "Let chrony or NTP set the clocks of all machines."
    if clocks[worst].least_s > SKEW_FAILURE_S:
        return Finding.failed("clocks", said, fix)
    return Finding.warning("clocks", said, fix)


def slow_links(links: Sequence[Link]) -> list[Link]:
    """Returns the links that are much slower than the median one."""
    if len(links) < 2:
        return []
    bandwidth = statistics.median(link.mb_per_s for link in links)
    latency = statistics.median(link.latency_ms for link in links)
    limit_ms = max(SLOW_ANSWER * latency, latency + SLOW_ANSWER_MS)
    return [link for link in links if link.mb_per_s < SLOW_LINK * bandwidth or link.latency_ms > limit_ms]


def check_links(links: Sequence[Link], broken: Sequence[str], wanted: int) -> Finding:
    """Judges the speed of the links.

    Args:
        links: what was measured.
        broken: what went wrong on links that could not be measured.
        wanted: how many links there are.
    """
    if broken:
        fix = "Look at the network between these workers: packets get lost, or a firewall ends connections."
        return Finding.failed("links", joined(broken), fix)
    if not links:
        return Finding.skipped("links", "there is no link to measure")
    bandwidth = statistics.median(link.mb_per_s for link in links)
    latency = statistics.median(link.latency_ms for link in links)
    said = f"median {bandwidth:.4g} MB/s and {latency:.3g} ms there and back"
    said += f", {len(links)} of {wanted} links" if len(links) < wanted else f", {wanted} links"
    slow = slow_links(links)
    if not slow:
        return Finding.ok("links", said)
    slow = sorted(slow, key=lambda link: link.mb_per_s)[:_SHOWN]
    named = [f"{link.source} to {link.target}: {link.mb_per_s:.4g} MB/s, {link.latency_ms:.3g} ms" for link in slow]
    fix = "Look at cables, switch ports and other users of the machines that these links share, or leave them out."
    return Finding.warning("links", joined([said, *named]), fix)


def _channel(cluster: Cluster, index: int) -> Channel:
    address = cluster.workers[index]
    return Channel.to(address, f"worker {index} ({address})", _REACH_S)
