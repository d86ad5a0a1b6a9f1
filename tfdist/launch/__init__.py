"""Starts the worker processes of a job on this machine and watches them."""

from tfdist.launch.local import launch

__all__ = ["launch"]
