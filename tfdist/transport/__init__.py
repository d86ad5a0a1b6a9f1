"""Transports: what moves buffers between replicas."""

from tfdist.transport.base import Transport
from tfdist.transport.collective import CollectiveTransport, enters_directly

__all__ = ["CollectiveTransport", "Transport", "enters_directly"]
