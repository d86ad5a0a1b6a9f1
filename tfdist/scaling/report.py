"""The report: report.html, which needs no network, report.md, report.json, and the plots in TensorBoard."""

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.image.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from tfdist.files import write_whole
from tfdist.scaling.plots import Plot, make_plots
from tfdist.scaling.result import Result

_NAMES = {
    "strong": "Strong scaling: the global batch stays",
    "weak": "Weak scaling: the batch of a replica stays",
    "given": "Runs",
}
FILES = ("report.html", "report.md", "report.json")


def write_report(result: Result, folder: "str | os.PathLike[str]", names: Sequence[str] = ()) -> list[Path]:
    """Writes the report.

    Args:
        result: what it says.
        folder: an existing folder; files of an earlier report in it are replaced.
        names: of the runs, where they were given one by one.

    Returns:
        The files.
    """
    folder = Path(folder)
    plots = make_plots(result)
    environment = Environment(loader=PackageLoader("tfdist.scaling"), trim_blocks=True, lstrip_blocks=True)
    values = {
        "result": result,
        "plots": plots,
        "names": _NAMES,
        "labels": {mode.mode: list(names) or mode.labels for mode in result.modes},
        "provenance": [(name, _text(value)) for name, value in result.provenance.items()],
        "median": statistics.median,
    }
    environment.autoescape = True
    write_whole(folder / FILES[0], environment.get_template("report.html.jinja").render(values))
    environment.autoescape = False
    write_whole(folder / FILES[1], environment.get_template("report.md.jinja").render(values))
    write_whole(folder / FILES[2], json.dumps(result.as_dict(), indent=1) + "\n")
    _write_tensorboard(folder / "tensorboard", plots)
    return [folder / name for name in FILES]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _write_tensorboard(folder: Path, plots: Sequence[Plot]) -> None:
    """Writes the plots as images, without TensorFlow, which takes seconds to import."""
    folder.mkdir(exist_ok=True)
    started = time.time()
    with open(folder / f"events.out.tfevents.{started:.0f}.report.{os.getpid()}", "wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=started, file_version="brain.Event:2").SerializeToString())
        for plot in plots:
            summary = Summary(value=[_image(plot)])
            writer.write(Event(wall_time=started, step=0, summary=summary).SerializeToString())


def _image(plot: Plot) -> Summary.Value:
    width, height = (int.from_bytes(plot.png[place : place + 4], "big") for place in (16, 20))
    content = [str(width).encode(), str(height).encode(), plot.png]
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(content))])
    tensor = TensorProto(dtype=DT_STRING, string_val=content, tensor_shape=shape)
    metadata = create_summary_metadata(display_name=plot.title, description=plot.alt)
    return Summary.Value(tag=f"report/{plot.name}", tensor=tensor, metadata=metadata)
