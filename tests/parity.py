"""Comparison of a model under a strategy with stock Keras on one device."""

from collections.abc import Callable
from typing import Any

import numpy as np

RTOL, ATOL = 1e-4, 1e-6


class Parity:
    """Trains the same model with stock Keras without any strategy, and with tfdist under several."""

    def __init__(self, strategies: dict[str, Any]):
        self.strategies = strategies

    def check(
        self,
        build: Callable[[], Any],
        train: Callable[[Any], Any],
        *,
        on: tuple[str, ...] = ("one_device", "mirrored2", "mirrored4"),
        rtol: float = RTOL,
        atol: float = ATOL,
        stock_train: Callable[[Any], Any] | None = None,
        stock_build: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        """Checks that weights and what `train` returns are equal.

        Args:
            build: returns a compiled model.
            train: trains a model, and returns its logs or results (numbers and arrays, nested).
            on: the strategies.
            rtol: relative bound.
            atol: absolute bound.
            stock_train: how to train the stock model, where it needs other words.
            stock_build: returns the stock model, where it is made of other layers with weights of the same shapes.
            options: of `tfdist.prepare`.
        """
        import keras

        import tfdist

        keras.utils.set_random_seed(1)
        stock = (stock_build or build)()
        start = stock.get_weights()
        expected = (stock_train or train)(stock)
        for name in on:
            strategy = self.strategies[name]
            with strategy.scope():
                keras.utils.set_random_seed(1)
                model = build()
            model.set_weights(start)
            tfdist.prepare(model, **options)
            found = train(model)
            for variable, a, b in zip(model.weights, model.get_weights(), stock.get_weights(), strict=True):
                np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=f"{name}: {variable.path}")
            self.same(found, expected, rtol, atol, name)
            self.replicas_agree(model, strategy)

    def same(self, found: Any, expected: Any, rtol: float, atol: float, where: str) -> None:
        """Compares nested numbers and arrays."""
        import keras

        found, expected = plain(found), plain(expected)
        keras.tree.assert_same_structure(found, expected)
        for path, (a, b) in enumerate(zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True)):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=max(atol, 1e-6), err_msg=f"{where}: result {path}")

    def replicas_agree(self, model: Any, strategy: Any) -> None:
        """Checks that all replicas hold the same weights, bit for bit."""
        for variable in model.weights:
            first, *others = strategy.experimental_local_results(variable.value)
            for other in others:
                np.testing.assert_array_equal(other.numpy(), first.numpy(), err_msg=variable.path)


def plain(value: Any) -> Any:
    """Returns histories as dicts, everything else as it is."""
    return dict(value.history) if hasattr(value, "history") else value
