"""Labels outside of the model's classes: found before training, not as a strange loss."""

from typing import Any

import numpy as np

from tfdist.data.source import ArraySource
from tfdist.data.sources.load import Datasets
from tfdist.errors import UsageError


def check_labels(datasets: Datasets, num_classes: int) -> None:
    """Checks that integer labels in memory are class indices.

    Args:
        datasets: the data; parts that are not arrays in memory are not looked at.
        num_classes: outputs of the model.

    Raises:
        UsageError: naming the first label outside of 0 to num_classes - 1.
    """
    for part_name in ("train", "validation", "test"):
        part = getattr(datasets, part_name)
        if not isinstance(part, ArraySource) or len(part.arrays) < 2:
            continue
        labels: Any = part.arrays[1]
        if isinstance(labels, dict | list | tuple):
            continue
        labels = np.asarray(labels)
        if not np.issubdtype(labels.dtype, np.integer):
            continue
        bad = np.argwhere((labels < 0) | (labels >= num_classes))
        if len(bad):
            place = tuple(int(i) for i in bad[0])
            raise UsageError(
                f"--data={datasets.name!r}: the {part_name} label of example {place[0]} is {int(labels[place])}, but "
                f"the model has {num_classes} classes, 0 to {num_classes - 1}; give it more classes or mend the labels"
            )
