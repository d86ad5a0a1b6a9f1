"""Transports: what moves buffers between replicas."""

from tfdist.transport.base import Request, Transport
from tfdist.transport.choice import check_transport, make_transport
from tfdist.transport.collective import CollectiveTransport, WorkerTransport, enters_directly
from tfdist.transport.link import Link, measure
from tfdist.transport.mpi import MPITransport

__all__ = [
    "CollectiveTransport",
    "Link",
    "MPITransport",
    "Request",
    "Transport",
    "WorkerTransport",
    "check_transport",
    "enters_directly",
    "make_transport",
    "measure",
]
