"""The TensorBoard log of a job: one run, written by the chief."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar
from tensorboard.plugins.hparams import api as hparams_api

from tfdist.telemetry.parts import PARTS
from tfdist.telemetry.record import WorkerTimes

_LAYOUT = {
    "Scaling": (
        ("Throughput (examples/s)", ["scaling/examples_per_second$", "scaling/examples_per_second_per_replica"]),
        ("Efficiency", ["scaling/efficiency"]),
        ("MFU", ["scaling/mfu"]),
    ),
    "Step": (
        ("Step (ms)", ["step/time_ms", "step/p95_ms"]),
        ("Where it goes (ms)", [f"time/{part}_ms$" for part in PARTS]),
    ),
    "Workers": (
        *((f"{part.capitalize()} by worker (ms)", [f"time/{part}_ms/worker_.*"]) for part in PARTS),
        ("Straggler (ms)", ["straggler/lag_ms"]),
        ("Slowest worker", ["straggler/slowest_worker"]),
    ),
    "Communication": (
        ("Bytes a step", ["comm/bytes_per_step"]),
        ("Compression ratio", ["comm/compression_ratio"]),
        ("Fidelity (cosine)", ["comm/fidelity"]),
        ("Bus bandwidth (GB/s)", ["comm/bus_bandwidth_gbps"]),
    ),
    "Memory and time": (
        ("Peak memory (MB)", ["memory/peak_mb"]),
        ("Goodput", ["scaling/goodput"]),
        ("Lost seconds", ["lost/.*_s"]),
    ),
}


class ScalingWriter:
    """Writes the scalars of a job, and how TensorBoard should lay them out.

    Args:
        log_dir: the folder.
    """

    def __init__(self, log_dir: "str | os.PathLike[str]"):
        self._writer = tf.summary.create_file_writer(os.fspath(log_dir))
        with self._writer.as_default(step=0), _recorded():
            # TensorBoard's own summary for the layout is one of TensorFlow 1; its content is what counts.
            layout = custom_scalar.pb(_layout()).value[0]
            content = tf.make_ndarray(layout.tensor)
            tf.summary.write(layout.tag, tf.constant(content), metadata=layout.metadata)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes what runs of a sweep are compared by."""
        with self._writer.as_default(step=0), _recorded():
            hparams_api.hparams(dict(hparams))

    def write(self, step: int, scalars: Mapping[str, "float | None"]) -> None:
        """Writes those of `scalars` that are known."""
        with self._writer.as_default(step=step), _recorded():
            for tag, value in scalars.items():
                if value is not None:
                    tf.summary.scalar(tag, value)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


def worker_scalars(workers: Sequence[WorkerTimes]) -> dict[str, float]:
    """Returns the series of each worker, where there are several."""
    if len(workers) == 1:
        return {}
    return {f"time/{part}_ms/worker_{i}": w.part(part) for part in PARTS for i, w in enumerate(workers)}


@contextlib.contextmanager
def _recorded() -> Any:
    """Writes whatever the user's own summaries are set to."""
    with tf.summary.record_if(True):
        yield


def _layout() -> layout_pb2.Layout:
    categories = []
    for title, charts in _LAYOUT.items():
        made = [
            layout_pb2.Chart(title=name, multiline=layout_pb2.MultilineChartContent(tag=tags)) for name, tags in charts
        ]
        categories.append(layout_pb2.Category(title=title, chart=made))
    return layout_pb2.Layout(category=categories)
