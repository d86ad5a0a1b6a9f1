"""Floating-point operations of a model, counted in its traced graph, and what devices can do."""

import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

_BACKWARD = 2.0  # the backward pass multiplies twice where the forward pass does once

PEAK_TFLOPS: Mapping[str, float] = {
    "T4": 65.0,
    "V100": 125.0,
    "A10": 125.0,
    "L4": 121.0,
    "A100": 312.0,
    "L40S": 362.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}
"""Dense 16-bit TFLOP/s of a device, by a part of its name; from the vendor's data sheets."""


def flops_per_example(model: keras.Model) -> float | None:
    """Returns the floating-point operations of a training step for one example, or None where they are not known.

    Matrix products and convolutions count, in the forward pass, times 3 for the backward pass. Loops are not counted.
    Reference: Chowdhery et al., PaLM, 2022, appendix B.

    Args:
        model: a built model whose inputs have known shapes (functional or sequential).
    """
    try:
        specs = [tf.TensorSpec([2, *tensor.shape[1:]], tensor.dtype) for tensor in keras.tree.flatten(model.inputs)]
        structure = model.inputs if len(specs) > 1 else model.inputs[0]
        packed = keras.tree.pack_sequence_as(structure, specs)
        forward = tf.function(lambda x: model(x, training=False), autograph=False)
        graph = forward.get_concrete_function(packed).graph
    except (AttributeError, TypeError, ValueError):  # a subclassed model has no inputs, or is called otherwise
        return None
    count = graph_flops(graph)
    return (1.0 + _BACKWARD) * count / 2 if count else None


def graph_flops(graph: tf.Graph) -> float:
    """Returns the floating-point operations of matrix products and convolutions in `graph`, with known shapes."""
    total = 0.0
    for operation in graph.get_operations():
        if operation.type in _COUNTS:
            total += _COUNTS[operation.type](operation)
        elif operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
            called = graph._get_function(operation.get_attr("f").name)  # the public API gives no function of a graph
            total += graph_flops(called.graph) if called is not None and hasattr(called, "graph") else 0.0
    return total


def peak_tflops() -> float | None:
    """Returns what one GPU of this process can do with 16-bit numbers, or None where that is not known."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "").replace("-", " ").split()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def _matmul(operation: tf.Operation) -> float:
    inner = operation.inputs[0].shape[0 if operation.get_attr("transpose_a") else 1]
    return 2.0 * _elements(operation.outputs[0]) * (inner or 0)


def _batch_matmul(operation: tf.Operation) -> float:
    inner = operation.inputs[0].shape[-2 if operation.get_attr("adj_x") else -1]
    return 2.0 * _elements(operation.outputs[0]) * (inner or 0)


def _einsum(operation: tf.Operation) -> float:
    terms = operation.get_attr("equation").decode().split("->")[0].split(",")
    if any("." in term for term in terms):
        return 0.0
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, operation.inputs, strict=True):
        sizes.update(zip(term, (size or 0 for size in tensor.shape), strict=True))
    return 2.0 * math.prod(sizes.values())


def _convolution(operation: tf.Operation) -> float:
    kernel = operation.inputs[1].shape
    return 2.0 * _elements(operation.outputs[0]) * (math.prod(kernel[:-1]) if kernel.is_fully_defined() else 0)


def _depthwise(operation: tf.Operation) -> float:
    kernel = operation.inputs[1].shape
    return 2.0 * _elements(operation.outputs[0]) * (math.prod(kernel[:2]) if kernel.is_fully_defined() else 0)


def _elements(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() or 0


_COUNTS: Mapping[str, Any] = {
    "MatMul": _matmul,
    "BatchMatMulV2": _batch_matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2dNative": _depthwise,
}
