"""tfdist: train Keras 3 models on many GPUs and many machines with TensorFlow."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Cluster": "tfdist.cluster",
    "PeerError": "tfdist.errors",
    "SaveCheckpoints": "tfdist.training.save_callback",
    "ScalingCallback": "tfdist.telemetry.callback",
    "TrainLoop": "tfdist.training.loop",
    "UsageError": "tfdist.errors",
    "make_strategy": "tfdist.strategy",
    "prepare": "tfdist.training.prepare",
}
_MODULES = ("data", "hooks", "training")

__all__ = [
    "Cluster",
    "PeerError",
    "SaveCheckpoints",
    "ScalingCallback",
    "TrainLoop",
    "UsageError",
    "data",
    "hooks",
    "make_strategy",
    "prepare",
    "training",
]

if TYPE_CHECKING:
    from tfdist import data, hooks, training
    from tfdist.cluster import Cluster
    from tfdist.errors import PeerError, UsageError
    from tfdist.strategy import make_strategy
    from tfdist.telemetry.callback import ScalingCallback
    from tfdist.training.loop import TrainLoop
    from tfdist.training.prepare import prepare
    from tfdist.training.save_callback import SaveCheckpoints


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for: the `tfdist` command must not wait for TensorFlow."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"tfdist.{name}")
    raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
