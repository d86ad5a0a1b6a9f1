"""A worker of `test_restart`: trains with a callback or a loop that keeps its state in FOLDER, and may die in between.

Usage: restart_worker.py {fit,loop} FOLDER [DIE_AT], by `tfdist launch`. Worker 1 dies when epoch DIE_AT
begins (fit) or after step DIE_AT (loop).
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402

import tfdist  # noqa: E402
from tests.multi_worker.models import dense, regression  # noqa: E402
from tfdist.data import ArraySource  # noqa: E402


def main(kind: str, folder: Path, die_at: int) -> None:
    strategy = tfdist.make_strategy("multi_worker")
    index = tfdist.Cluster.detect().index
    with strategy.scope():
        model = dense()
        model.compile(keras.optimizers.Adam(0.05), "mse")

    def die(now: int) -> None:
        if now == die_at and index == 1:
            os._exit(7)

    def begin(epoch: int, logs: object = None) -> None:
        print(f"epoch {epoch} begins", flush=True)
        die(epoch)

    if kind == "fit":
        callbacks = [
            keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
            keras.callbacks.LambdaCallback(on_epoch_begin=begin),
        ]
        tfdist.prepare(model)
        x, y = regression(22)
        model.fit(x, y, batch_size=5, epochs=5, shuffle=False, verbose=0, callbacks=callbacks)
    else:
        source = ArraySource(regression(22), batch_size=5, seed=2)
        loop = tfdist.TrainLoop(model, loss="mse", optimizer="adam", steps_per_loop=2)
        loop.build(source)
        checkpoints = loop.checkpoints(folder / "checkpoints")
        loop.resume(checkpoints)
        print(f"step {loop.step} begins", flush=True)
        loop.run(
            source,
            steps=25 - loop.step,
            checkpoints=checkpoints,
            checkpoint_every=4,
            callbacks=[lambda state: die(state.step)],
        )
    values = [value.tolist() for value in model.get_weights()]
    (folder / f"weights_{index}").write_text(repr(values))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1)
