"""The built-in data, and data of the user's by name."""

from tfdist.data.sources.labels import check_labels
from tfdist.data.sources.load import Datasets, is_function, load

__all__ = ["Datasets", "check_labels", "is_function", "load"]
