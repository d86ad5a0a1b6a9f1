"""Trains a model on data under a strategy. Every choice is a flag; read it from top to bottom.

python scripts/train.py --model=digits_cnn --data=digits --epochs=5
tfdist launch --workers=2 scripts/train.py --strategy=multi_worker --model=digits_cnn --data=digits
"""

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that has models/
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags as absl_flags  # noqa: E402

from tfdist import flags  # noqa: E402

flags.define()


def main() -> None:
    """Does what the flags say."""
    config = flags.parse(absl_flags.FLAGS)

    # From here on TensorFlow is needed; wrong flags have been told already.
    import keras

    import models
    import tfdist
    from tfdist.optimizers import make_optimizer
    from tfdist.strategy import is_chief, leave_together, num_workers
    from tfdist.summary import StepTimes, Summary, peak_memory_mb, restarts, weights_sha256
    from tfdist.training.checkpoint import require_checkpoint

    # What to train, on what. Nothing here touches a device or the network: what is wrong is told at once.
    spec = models.find(config.model.name)
    load = functools.partial(
        tfdist.data.load, config.data.spec, batch_size=config.data.global_batch_size, seed=config.seed
    )
    data = None if tfdist.data.is_function(config.data.spec) else load()
    sizes = None if data is None else models.config_for(spec, data.train, config.model.sizes)
    if config.output.resume == "must":
        require_checkpoint(config.output.checkpoint_dir)

    # Where. A function of the user's may touch devices, so it is called after the strategy is made.
    if config.seed is not None:
        keras.utils.set_random_seed(config.seed)
    strategy = tfdist.make_strategy(
        config.devices.strategy,
        num_devices=config.devices.num_devices,
        start_timeout=config.devices.start_timeout,
        hang_timeout=config.devices.hang_timeout,
    )
    if data is None:
        data = load()
        sizes = models.config_for(spec, data.train, config.model.sizes)
    keras.config.set_dtype_policy(config.step.precision)
    with strategy.scope():
        model = models.build(spec, **sizes)
        optimizer = make_optimizer(config.optimizer)
    if spec.task in ("image_classification", "language_model"):
        tfdist.data.check_labels(data, model.output_shape[-1])

    # Train.
    times = StepTimes()
    train = _fit if config.loop.kind == "fit" else _loop
    hook = tfdist.hooks.parse(config.step.hook)
    losses, metrics = train(config, spec, model, optimizer, data, times, hook)

    # Report, once.
    weights = weights_sha256(model)
    if not is_chief(strategy):
        return
    throughput = times.examples_per_second(config.data.global_batch_size)
    if config.output.summary_json is not None:
        Summary(
            strategy=config.devices.strategy,
            num_workers=num_workers(strategy),
            num_replicas=strategy.num_replicas_in_sync,
            global_batch_size=config.data.global_batch_size,
            hook=config.step.hook or "allreduce",
            transport=hook.transport.name,
            steps=times.steps,
            examples_per_second=throughput,
            step_time_ms=times.step_time_ms(),
            first_loss=losses[0] if losses else None,
            final_loss=losses[-1] if losses else None,
            final_metrics=metrics,
            weights_sha256=weights,
            restarts=restarts(),
            peak_memory_mb=peak_memory_mb(),
        ).write(config.output.summary_json)
    for name, value in metrics.items():
        if name.startswith("test_"):
            print(f"test {name.removeprefix('test_')}: {value:.4f}")
    if throughput is not None:
        print(f"throughput: {throughput:,.0f} examples/s")
    if config.output.checkpoint_dir is not None:
        newest = max(Path(config.output.checkpoint_dir).glob("step-*"), default=config.output.checkpoint_dir)
        print(f"checkpoint: {newest}")
    if config.output.log_dir is not None:
        print(f"TensorBoard log: {config.output.log_dir} (tensorboard --logdir={config.output.log_dir})")
    leave_together(strategy)


def _fit(config, spec, model, optimizer, data, times, hook):
    """Trains with Keras's fit; returns the loss of each epoch, and the metrics at the end."""
    import keras

    import tfdist
    from tfdist.training.save_callback import SaveCheckpoints
    from tfdist.training.stop_callback import StopAtStep

    with model.distribute_strategy.scope():
        model.compile(
            optimizer=optimizer,
            loss=spec.loss(),
            metrics=spec.metrics(),
            steps_per_execution=config.loop.steps_per_loop,
            jit_compile=False,
        )
    tfdist.prepare(
        model,
        hook=hook,
        transport=config.step.transport,
        accumulate_steps=config.step.accumulate_steps,
        clip_global_norm=config.step.clip_global_norm,
        jit_compile=config.step.jit_compile,
        step_listener=times,
    )
    callbacks = []
    output = config.output
    if output.checkpoint_dir is not None:
        callbacks.append(
            SaveCheckpoints(
                output.checkpoint_dir,
                every=output.checkpoint_every,
                keep=output.keep_checkpoints,
                resume=output.resume,
                on_save_error=output.on_save_error,
            )
        )
    if output.log_dir is not None:
        callbacks += [keras.callbacks.TensorBoard(output.log_dir), _telemetry(config)]
    epochs = config.loop.epochs
    if epochs is None:
        epochs = -(-config.loop.steps // (data.train.steps_per_epoch or config.loop.steps))
        callbacks.append(StopAtStep(config.loop.steps))
    history = model.fit(data.train, epochs=epochs, validation_data=data.validation, callbacks=callbacks).history
    metrics = {name: values[-1] for name, values in history.items() if values}
    if data.test is not None:
        tested = model.evaluate(data.test, verbose=0, return_dict=True)
        metrics |= {f"test_{name}": value for name, value in tested.items()}
    return history.get("loss", []), metrics


def _loop(config, spec, model, optimizer, data, times, hook):
    """Trains with the custom loop; returns the loss of each call of the loop, and the metrics at the end."""
    import tensorflow as tf

    import tfdist
    from tfdist.errors import UsageError
    from tfdist.strategy import is_chief

    loop = tfdist.TrainLoop(
        model,
        loss=spec.loss(),
        optimizer=optimizer,
        metrics=spec.metrics(),
        hook=hook,
        transport=config.step.transport,
        accumulate_steps=config.step.accumulate_steps,
        clip_global_norm=config.step.clip_global_norm,
        jit_compile=config.step.jit_compile,
        steps_per_loop=config.loop.steps_per_loop,
        step_listener=times,
    )
    steps = config.loop.steps
    per_epoch = getattr(data.train, "steps_per_epoch", None)
    if steps is None:
        if per_epoch is None:
            raise UsageError(f"--epochs={config.loop.epochs}: the length of this data is not known; give --steps")
        steps = config.loop.epochs * per_epoch
    checkpoints = None
    output = config.output
    if output.checkpoint_dir is not None:
        loop.build(data.train)
        checkpoints = loop.checkpoints(
            output.checkpoint_dir, keep=output.keep_checkpoints, on_save_error=output.on_save_error
        )
        loop.resume(checkpoints, output.resume)
    chief = is_chief(loop.strategy)
    writer = tf.summary.create_file_writer(output.log_dir) if output.log_dir is not None and chief else None
    losses = []

    def show(state):
        losses.append(state.logs["loss"])
        figures = {**state.logs, **{f"val_{name}": value for name, value in state.validation.items()}}
        if writer is not None:
            with writer.as_default(state.step):
                for name, value in figures.items():
                    tf.summary.scalar(name, value)
        if chief and (state.validation or state.step == steps):
            print(f"step {state.step}/{steps} " + " ".join(f"{name}: {v:.4f}" for name, v in figures.items()))

    metrics = {}
    if loop.step < steps:
        metrics = loop.run(
            data.train,
            steps=steps - loop.step,
            validation=data.validation,
            validate_every=per_epoch,
            checkpoints=checkpoints,
            checkpoint_every=output.checkpoint_every,
            callbacks=[show] if output.log_dir is None else [show, _telemetry(config)],
        )
    elif data.validation is not None:
        metrics = {f"val_{name}": value for name, value in loop.evaluate(data.validation).items()}
    if writer is not None:
        writer.close()
    if data.test is not None:
        metrics |= {f"test_{name}": value for name, value in loop.evaluate(data.test).items()}
    return losses, metrics


def _telemetry(config):
    """Returns what measures the steps, and writes it into the log_dir."""
    import tfdist
    from tfdist.config import parse_steps

    output = config.output
    hparams = {"model": config.model.name, "optimizer": config.optimizer.name, "precision": config.step.precision}
    if config.optimizer.learning_rate is not None:
        hparams["learning_rate"] = config.optimizer.learning_rate
    steps = None if output.trace_steps is None else parse_steps(output.trace_steps)
    return tfdist.ScalingCallback(output.log_dir, trace_steps=steps, profile=output.profile, hparams=hparams)


if __name__ == "__main__":
    flags.run_main(main)
