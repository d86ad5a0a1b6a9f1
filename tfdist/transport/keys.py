"""Names for exchanges: equal on all workers, and unlike all that run beside them."""

import weakref
import zlib

import tensorflow as tf

MOST_KEYS = 1 << 26  # so that MPI, whose tags may end at 2**29, has room for several an exchange

_taken: "weakref.WeakKeyDictionary[tf.Graph, set[int]]" = weakref.WeakKeyDictionary()


def exchange_key(what: str) -> int:
    """Returns what names an exchange on all workers.

    It comes from what is exchanged and how often that stands in the function being traced, not from how many
    were traced before, so workers may trace other functions in between.

    Args:
        what: kind, dtype and shape.
    """
    key = zlib.crc32(what.encode()) % MOST_KEYS
    if tf.executing_eagerly():
        return key
    taken = _taken.setdefault(_outermost(tf.compat.v1.get_default_graph()), set())
    while key in taken:
        key = (key + 1) % MOST_KEYS
    taken.add(key)
    return key


def _outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph of the whole function, where `graph` is that of a branch or of a loop's body within it."""
    outer = getattr(graph, "outer_graph", None)
    return _outermost(outer) if getattr(outer, "building_function", False) else graph
