"""The names of a step's parts, for modules that must not wait for TensorFlow."""

PARTS = ("input", "compute", "communication", "overhead")
