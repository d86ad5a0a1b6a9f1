"""Which transport a job uses."""

import logging
from collections.abc import Callable

import tensorflow as tf

from tfdist.cluster.mpi import is_installed, processes
from tfdist.config import TRANSPORTS
from tfdist.errors import UsageError
from tfdist.transport.base import Transport
from tfdist.transport.collective import CollectiveTransport, enters_directly
from tfdist.transport.link import Link, measure
from tfdist.transport.mpi import MPITransport, require_suited

_BYTES = 4 << 20  # of the all-reduce that the transports are compared by
_NEARLY = 1.1

_log = logging.getLogger("tfdist")


def check_transport(transport: "str | Transport", strategy: tf.distribute.Strategy) -> None:
    """Checks that `transport` can be used, before it is made.

    Raises:
        UsageError: an unknown name, or MPI where it cannot be used.
    """
    if isinstance(transport, Transport):
        return
    if transport not in TRANSPORTS:
        raise UsageError(
            f"transport={transport!r}: choose one of {', '.join(TRANSPORTS)}, or give a tfdist.transport.Transport"
        )
    if transport == "mpi":
        require_suited(strategy)


def make_transport(
    transport: "str | Transport", strategy: tf.distribute.Strategy, agree: Callable[[int], int]
) -> Transport:
    """Returns the transport. Every worker must call it, with the same.

    Args:
        transport: "collective", "mpi", a transport, or "auto": MPI where the workers run under it, have one CPU
            replica each, and it is not slower than the collectives, which is measured; else the collectives.
        strategy: the strategy.
        agree: returns the chief's value on every worker.

    Raises:
        UsageError: see `check_transport`.
    """
    check_transport(transport, strategy)
    if isinstance(transport, Transport):
        return transport
    if transport == "mpi":
        return MPITransport(strategy)
    collective = CollectiveTransport()
    if transport == "collective" or not enters_directly(strategy) or not agree(processes() if is_installed() else 0):
        return collective
    mpi = MPITransport(strategy)
    links = {one.name: measure(strategy, one) for one in (mpi, collective)}
    seconds = {name: link.seconds(_BYTES) for name, link in links.items()}
    # Where the link is what limits both, MPI still takes less of the core that computes.
    takes_mpi = bool(agree(seconds["mpi"] <= _NEARLY * seconds["collective"]))
    chosen, other = (mpi, collective) if takes_mpi else (collective, mpi)
    _log.info("transport auto: %s: %s; %s: %s", chosen.name, _said(links, chosen), other.name, _said(links, other))
    return chosen


def _said(links: dict[str, Link], transport: Transport) -> str:
    link = links[transport.name]
    return f"4 MiB in {1e3 * link.seconds(_BYTES):.1f} ms, latency {1e3 * link.latency_s:.2f} ms"
