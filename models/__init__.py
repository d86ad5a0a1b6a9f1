"""Reference models: `build(**sizes) -> keras.Model`, uncompiled, with float32 logits."""

from models.registry import BUILTIN, ModelSpec, build, find, load
from models.sizes import config_for

__all__ = ["BUILTIN", "ModelSpec", "build", "config_for", "find", "load"]
