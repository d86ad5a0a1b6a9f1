"""`make_strategy`: what each name makes, what it says, and what it refuses."""

import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.eager import context as tf_context

import tfdist
from tfdist.errors import UsageError
from tfdist.strategy import distributed_strategies, is_chief, num_local_replicas, num_workers, worker_index


def run(code: str, **env: str) -> dict:
    """Runs `code` in a fresh process, where TensorFlow's devices are not initialised; returns what it puts in `out`."""
    program = "import json\nout = {}\n" + textwrap.dedent(code) + "\nprint(json.dumps(out))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_names_make_their_strategies(strategies):
    one, two = strategies["one_device"], strategies["mirrored2"]
    assert isinstance(one, tf.distribute.OneDeviceStrategy) and one.num_replicas_in_sync == 1
    assert isinstance(two, tf.distribute.MirroredStrategy) and two.num_replicas_in_sync == 2
    assert [device.rpartition("/")[2] for device in two.extended.worker_devices] == ["device:CPU:0", "device:CPU:1"]
    assert is_chief(one) and worker_index(two) == 0 and num_workers(two) == 1 and num_local_replicas(two) == 2
    assert two in distributed_strategies() and one not in distributed_strategies()


def test_devices_by_name(cpu_devices):
    strategy = tfdist.make_strategy("mirrored", devices=["CPU:1", "/device:CPU:3"])
    assert [device.rpartition(":")[2] for device in strategy.extended.worker_devices] == ["1", "3"]
    assert tfdist.make_strategy("one_device", devices=["CPU:2"]).extended.worker_devices[0].endswith("CPU:2")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mirored", {}, "strategy='mirored': choose one of one_device, mirrored, .*did you mean 'mirrored'"),
        (None, {}, "strategy=None: choose one of"),
        ("mirrored", {"num_devices": 0}, "num_devices=0: at least 1"),
        ("mirrored", {"num_devices": 257}, "num_devices=257: at most 256"),
        ("mirrored", {"num_devices": 3, "devices": ["CPU:0"]}, "num_devices=3 and devices=.*disagree"),
        ("mirrored", {"devices": ["CPU:0", "CPU:0"]}, "a device is named twice"),
        ("mirrored", {"devices": ["TPU:0"]}, "'TPU:0' is no device; write them as 'GPU:0'"),
        ("mirrored", {"devices": ["CPU:0", "GPU:0"]}, "no such device: GPU:0; this machine has CPU:0"),
        ("one_device", {"num_devices": 2}, "one_device' takes one device.*use strategy='mirrored'"),
        ("mirrored", {"num_devices": 5}, "initialised before 5 logical CPU devices could be set.*first"),
        ("multi_worker", {}, "initialised before the collectives of multi_worker could be set.*first"),
        ("multi_worker", {"num_devices": 257}, "num_devices=257: at most 256"),
    ],
)
def test_wrong_use_names_the_argument_and_the_fix(cpu_devices, name, options, words):
    with pytest.raises(UsageError, match=words):
        tfdist.make_strategy(name, **options)


def test_what_cpu_workers_rely_on():
    """tfdist.cpu_workers says which devices a worker has by this method, and makes the strategy around it."""
    made = collective_all_reduce_strategy.CollectiveAllReduceExtended
    assert list(inspect.signature(made._initialize_local_devices).parameters) == [
        "self",
        "cluster_resolver",
        "worker_device",
    ]
    code = "import tfdist; s = tfdist.make_strategy('multi_worker', num_devices=3); print(s.num_replicas_in_sync)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "3\n", done.stderr


def test_what_coordination_relies_on():
    """tfdist.coordination sets TensorFlow's watch up before the strategy would; a job shows it: test_survival."""
    assert "heartbeat_timeout_in_ms" in inspect.signature(tf_context.Context.configure_coordination_service).parameters
    made = collective_all_reduce_strategy.CollectiveAllReduceExtended
    assert "if context.context().coordination_service is None:" in inspect.getsource(made)


def test_wrong_use_that_nobody_catches_is_exit_code_2():
    code = "import tfdist; tfdist.make_strategy('auto', devices=['gpu:7'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("tfdist.errors.UsageError: ") and "Traceback" in done.stderr
    code = "import tfdist; tfdist.make_strategy('one_device'); raise ValueError('mine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: mine\n")


def test_auto_says_what_it_chose_and_why(cpu_devices, caplog):
    with caplog.at_level(logging.INFO, logger="tfdist"):
        assert tfdist.make_strategy("auto").num_replicas_in_sync == 1
        assert tfdist.make_strategy("auto", num_devices=3).num_replicas_in_sync == 3
    assert [record.message for record in caplog.records] == [
        "strategy auto: one_device, because one worker and no accelerator",
        "strategy auto: mirrored, because 3 devices were asked for",
    ]


def test_refused_names_touch_no_device_and_logical_devices_are_made():
    out = run("""
        import tfdist, tensorflow as tf
        from tfdist.strategy import _devices_are_initialised
        for name, options in (("x", {}), ("mirrored", {"num_devices": 999}), ("mirrored", {"devices": [":"]})):
            try:
                tfdist.make_strategy(name, **options)
            except tfdist.UsageError:
                pass
        out["early"] = _devices_are_initialised()
        out["replicas"] = tfdist.make_strategy("mirrored", num_devices=3).num_replicas_in_sync
        out["late"] = _devices_are_initialised()
        out["threads"] = tf.config.threading.get_inter_op_parallelism_threads()
    """)
    assert out == {"early": False, "replicas": 3, "late": True, "threads": 0}


def test_multi_worker_of_one_worker_needs_no_network():
    out = run("""
        import tfdist
        from tfdist.strategy import is_chief, num_workers
        strategy = tfdist.make_strategy("multi_worker")
        out["type"] = type(strategy).__name__
        out["replicas"], out["workers"] = strategy.num_replicas_in_sync, num_workers(strategy)
        out["chief"] = is_chief(strategy)
    """)
    assert out == {"type": "CollectiveAllReduceStrategy", "replicas": 1, "workers": 1, "chief": True}


def test_a_worker_that_never_comes_up_is_named():
    out = run(
        """
        import socket, time, os, tfdist
        ports = []
        for _ in range(2):
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                ports.append(s.getsockname()[1])
        addresses = [f"127.0.0.1:{port}" for port in ports]
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}})
        start = time.monotonic()
        try:
            tfdist.make_strategy("multi_worker", start_timeout=1.5)
        except tfdist.PeerError as error:
            out["error"], out["missing"] = str(error), addresses[1]
        out["waited"] = time.monotonic() - start
        """
    )
    assert out["missing"] in out["error"] and "worker 1" in out["error"]
    assert out["waited"] < 30


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sums_over_devices_are_right_with_the_chosen_communication(strategies, count):
    """HierarchicalCopyAllReduce, which would be a little faster, is wrong for odd numbers of devices."""
    strategy = strategies[f"mirrored{count}"]
    values = [np.arange(6, dtype="float32") * 10**i for i in range(count)]

    @tf.function
    def reduced():
        def replica():
            context = tf.distribute.get_replica_context()
            mine = tf.constant(np.stack(values))[context.replica_id_in_sync_group]
            return context.all_reduce(tf.distribute.ReduceOp.SUM, [mine, mine[:1]])

        return strategy.run(replica)

    for part, whole in zip(reduced(), (sum(values), sum(values)[:1]), strict=True):
        for found in strategy.experimental_local_results(part):
            np.testing.assert_array_equal(found, whole)


def test_sums_over_devices_do_not_depend_on_whose_memory_is_free(strategies):
    """AddN would begin with the third replica's value, which nobody else needs: (1 - 1e8) + 1e8 is 0 in float32."""
    strategy = strategies["mirrored3"]
    held = [tf.constant([1e8] * 4), tf.constant([-1e8] * 4)]

    @tf.function(autograph=False)
    def reduced(x):
        def replica(x):
            context = tf.distribute.get_replica_context()
            replica_id = int(tf.get_static_value(context.replica_id_in_sync_group))
            mine = x + 1.0 if replica_id == 2 else held[replica_id]
            return context.all_reduce("sum", mine)

        return strategy.run(replica, args=(x,))

    for part in strategy.experimental_local_results(reduced(tf.zeros([4]))):
        np.testing.assert_array_equal(part, [1.0] * 4)


def test_the_communication_that_is_not_taken_is_still_wrong(cpu_devices):
    """Why `ReductionToOneDevice` is chosen on CPU devices: once this fails, the faster one can be tried again."""
    ops = tf.distribute.HierarchicalCopyAllReduce()
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(3)], cross_device_ops=ops)

    def replica():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.cast(10**context.replica_id_in_sync_group, tf.float32))

    sums = {float(v) for v in strategy.experimental_local_results(strategy.run(replica))}
    assert sums != {111.0}
