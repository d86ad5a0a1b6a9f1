"""One process of `tfdist verify`: trains every case asked for under one strategy and writes what came out.

It is a script, because `tfdist launch` starts scripts: verify_run.py FOLDER STRATEGY DEVICES LOOPS CASES. The strategy
"stock" is Keras alone: no strategy, and nothing of tfdist.
"""

import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.diagnostics.verify_cases import Training, training

EPOCHS = 2


def main(folder: Path, strategy_name: str, devices: int, loops: list[str], cases: list[str]) -> None:
    """Writes FOLDER/STRATEGY.WORKER.npz: arrays named LOOP/CASE/WHAT."""
    strategy, worker = None, 0
    if strategy_name != "stock":
        has_gpus = bool(tf.config.list_physical_devices("GPU"))
        replicas = (devices or (None if has_gpus else 2)) if strategy_name == "mirrored" else None
        strategy = tfdist.make_strategy(strategy_name, num_devices=replicas)
        worker = tfdist.Cluster.detect().index if strategy_name == "multi_worker" else 0
    arrays = {"num_replicas": np.asarray(strategy.num_replicas_in_sync if strategy else 1)}
    for case in cases:
        for loop in loops if strategy else ["stock"]:
            found = _stock(training(case)) if strategy is None else _distributed(training(case), strategy, loop)
            arrays.update({f"{loop}/{case}/{what}": value for what, value in found.items()})
    temporary = folder / f"{strategy_name}.{worker}.new.npz"
    np.savez(temporary, **arrays)
    temporary.rename(folder / f"{strategy_name}.{worker}.npz")


def _stock(run: Training) -> dict[str, np.ndarray]:
    model = _with_fixed_weights(run.model())
    model.compile((run.stock_optimizer or run.optimizer)(), run.loss(), metrics=list(run.metrics))
    return _fitted(model, run)


def _distributed(run: Training, strategy: "object", loop: str) -> dict[str, np.ndarray]:
    with strategy.scope():
        model = _with_fixed_weights(run.model())
        if loop == "fit":
            model.compile(run.optimizer(), run.loss(), metrics=list(run.metrics))
    if loop == "fit":
        return _fitted(tfdist.prepare(model, **run.options), run)
    train_loop = tfdist.TrainLoop(
        model, loss=run.loss(), optimizer=run.optimizer(), metrics=run.metrics, steps_per_loop=2, **run.options
    )
    source = tfdist.data.ArraySource(run.data, batch_size=run.batch_size, shuffle=False)
    logs = train_loop.run(source, steps=EPOCHS * source.steps_per_epoch)
    results = train_loop.evaluate(source)
    return _named(model, logs, results)


def _fitted(model: keras.Model, run: Training) -> dict[str, np.ndarray]:
    x, y, weights = keras.utils.unpack_x_y_sample_weight(run.data)
    batches = {"sample_weight": weights, "batch_size": run.batch_size, "verbose": 0}
    history = model.fit(x, y, epochs=EPOCHS, shuffle=False, **batches).history
    # Every epoch has as many examples, so the mean of its means is that of a loop over all of them.
    logs = {name: np.mean(values) for name, values in history.items()}
    return _named(model, logs, model.evaluate(x, y, return_dict=True, **batches))


def _named(model: keras.Model, logs: dict, results: dict) -> dict[str, np.ndarray]:
    named = {f"training {name}": value for name, value in logs.items()}
    named |= {f"evaluated {name}": value for name, value in results.items()}
    named |= {f"weights {i:02d}": value for i, value in enumerate(model.get_weights())}
    return {name: np.asarray(value, "float64") for name, value in named.items()}


def _with_fixed_weights(model: keras.Model) -> keras.Model:
    """Sets the matrices to the same values in every process; vectors start as zeros and ones everywhere."""
    rng = np.random.default_rng(1)
    for variable in model.trainable_weights:
        if len(variable.shape) > 1:
            variable.assign(rng.normal(scale=0.4, size=variable.shape).astype("float32"))
    return model


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","), sys.argv[5].split(","))
