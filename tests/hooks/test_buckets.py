"""Buckets: their order is that of the backward pass, and nothing is lost in them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.hooks.buckets import backward_order, make_buckets
from tfdist.training.update import added, scaled


@pytest.fixture(autouse=True)
def devices(cpu_devices):
    """TensorFlow's devices are made before anything here runs."""


def order_of(gradients_of):
    """Returns the order that is found while `gradients_of` is traced."""
    found = []

    @tf.function(autograph=False)
    def trace():
        found.extend(backward_order(gradients_of()))

    trace.get_concrete_function()
    return found


def chain():
    layers = [keras.layers.Dense(4, use_bias=False) for _ in range(4)]
    for layer in layers:
        layer.build((None, 4))
    return layers


def gradients(layers, weight=1.0):
    variables = [layer.kernel.value for layer in layers]
    with tf.GradientTape() as tape:
        x = tf.ones([2, 4])
        for layer in layers:
            x = layer(x)
        loss = tf.reduce_sum(x) * weight
    return tape.gradient(loss, variables)


def test_the_last_layer_comes_first():
    layers = chain()
    assert order_of(lambda: gradients(layers)) == [3, 2, 1, 0]


def test_layers_in_another_order_than_they_were_made():
    first, second, third, fourth = chain()

    def permuted():
        by_use = gradients([third, first, fourth, second])
        return [by_use[1], by_use[3], by_use[0], by_use[2]]

    assert order_of(permuted) == [1, 3, 0, 2]


def test_what_is_done_to_gradients_afterwards_does_not_count():
    layers = chain()

    def accumulated():
        first, second = gradients(layers), gradients(layers)
        total = [added(a, b) for a, b in zip(first, second, strict=True)]
        return [scaled(g, 0.5) for g in total]

    assert order_of(accumulated) == [3, 2, 1, 0]


def test_gradients_of_one_operation_come_last_variable_first():
    layers = chain()
    compiled = tf.function(lambda: gradients(layers), autograph=False, jit_compile=True)
    assert order_of(compiled) == [3, 2, 1, 0]
    assert backward_order([tf.zeros([1])] * 3) == [2, 1, 0]


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=12),
    kinds=st.lists(st.sampled_from(["float32", "float64", "float16"]), min_size=12, max_size=12),
    bucket_bytes=st.sampled_from([0, 1, 64, 200, 10_000]),
)
def test_every_gradient_lies_in_one_bucket(shapes, kinds, bucket_bytes):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(kind) for shape, kind in zip(shapes, kinds, strict=False)]
    tensors = [tf.constant(array) for array in arrays]
    buckets = make_buckets(tensors, bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket.indices) == list(range(len(tensors)))
    for bucket in buckets:
        buffer = bucket.pack(tensors)
        assert buffer.dtype == bucket.dtype and buffer.shape.rank == 1
        assert len(bucket.indices) == 1 or sum(arrays[i].nbytes for i in bucket.indices) <= bucket_bytes
        for i, part in zip(bucket.indices, bucket.unpack(buffer), strict=True):
            np.testing.assert_array_equal(part, arrays[i])
