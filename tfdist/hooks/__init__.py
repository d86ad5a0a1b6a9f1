"""Gradient-aggregation hooks: how the replicas' gradients become one gradient, and what that costs."""

from tfdist.hooks.allreduce import AllReduce
from tfdist.hooks.base import Hook
from tfdist.hooks.spec import parse

__all__ = ["AllReduce", "Hook", "parse"]
