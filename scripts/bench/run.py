"""One process of scripts/bench_step.py: run.py GROUP ROUNDS STEPS NAMES OUT. Times its pairs in turns."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that has models/
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import models  # noqa: E402
import tfdist  # noqa: E402
from scripts.bench import cases  # noqa: E402


def main(group: str, rounds: int, steps: int, names: list[str], out: Path) -> None:
    """Writes what was measured as JSON, on the first worker."""
    rows = []
    if group == "endurance":
        rows = endurance(steps)
    elif group == "save":
        rows = [save(rounds, steps)]
    else:
        for pair in getattr(cases, group)(steps):
            if not names or pair.name in names:
                rows.append(timed(pair, rounds))
    if tfdist.Cluster.detect().index == 0:
        out.write_text(json.dumps(rows))


def timed(pair: cases.Pair, rounds: int) -> dict:
    """Runs both sides in turns, after one run of each that is not counted."""
    other, ours = [], []
    for round_number in range(rounds + 1):
        a = pair.other() if pair.other else float("nan")
        b = pair.ours()
        if round_number:
            other.append(a)
            ours.append(b)
    ratios = np.asarray(ours) / np.asarray(other)
    low, middle, high = (None, None, None) if pair.other is None else np.percentile(ratios, [25, 50, 75]).tolist()
    return {
        "name": pair.name,
        "other_ms": None if pair.other is None else 1e3 * float(np.median(other)),
        "ours_ms": 1e3 * float(np.median(ours)),
        "ratio": middle,
        "quartiles": [low, high],
        "target": pair.target,
    }


def endurance(steps: int) -> list[dict]:
    """Trains for 2,000 steps (20 times `steps`): counts traces after the first epoch, and compares memory."""
    strategy = tfdist.make_strategy("mirrored", num_devices=2)
    traces = 0

    def loss(y_true, y_pred):  # noqa: ANN001, ANN202
        nonlocal traces
        traces += 1
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile("adam", loss, metrics=["accuracy"])
    tfdist.prepare(model)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(steps * 16, 64)).astype("float32"), rng.integers(0, 10, size=steps * 16)
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            seen.append((traces, resident_mb()))

    model.fit(x, y, batch_size=16, epochs=20, verbose=0, callbacks=[Looks()])
    early, late = seen[4][1], seen[-1][1]
    return [
        {
            "name": "endurance",
            "steps": 20 * steps,
            "traces_after_first_epoch": seen[-1][0] - seen[0][0],
            "memory_mb": [early, late],
            "memory_growth": late / early - 1,
        }
    ]


def save(rounds: int, steps: int) -> dict:
    """Trains a transformer of 3.3 million weights, and compares the steps during which a checkpoint is written.

    In each second run of `every` steps a checkpoint is written, and waited for at its end. So the first interval of
    such a run holds the copy of the weights, all its intervals the writing, and the other runs neither.
    """
    every = max(2, steps // 5)
    strategy = tfdist.make_strategy("one_device")
    with strategy.scope():
        model = models.build(models.find("transformer_lm"), vocab=256, seq_len=64, width=256, depth=4)
    intervals, began = [], None

    def seen(report: object) -> None:
        nonlocal began
        if began is not None:
            intervals.append(time.perf_counter() - began)
        if report.step % (2 * every) == every:
            checkpoints.wait()
        began = time.perf_counter()
        if report.step % (2 * every) == 0:
            checkpoints.save(report.step, loop.position)

    loop = tfdist.TrainLoop(model, loss=cases.loss(), optimizer="adam", step_listener=seen)
    tokens = np.random.default_rng(0).integers(0, 256, size=(8, 65)).astype("int32")
    source = tfdist.data.ArraySource((tokens[:, :-1], tokens[:, 1:]), batch_size=8, seed=1)
    loop.build(source)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = loop.checkpoints(folder)
        checkpoints.prepare()
        loop.run(source, steps=2 * every * (rounds + 1))
    runs = np.array(intervals[2 * every - 1 : 2 * every * (rounds + 1) - 1]).reshape(rounds, 2, every)
    saving, others = runs[:, 0, 0], runs[:, 1]
    ratios = saving / np.median(others)
    low, middle, high = np.percentile(ratios, [25, 50, 75]).tolist()
    return {
        "name": "save_transformer",
        "other_ms": 1e3 * float(np.median(others)),
        "ours_ms": 1e3 * float(np.median(saving)),
        "ratio": middle,
        "quartiles": [low, high],
        "target": 1.1,
        "while_writing": float(np.median(runs[:, 0]) / np.median(others)),
    }


def resident_mb() -> float:
    """Returns the memory that this process occupies, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0], int(given[1]), int(given[2]), [name for name in given[3].split(",") if name], Path(given[4]))
