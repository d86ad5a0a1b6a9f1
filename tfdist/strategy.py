"""From a name and a cluster to a `tf.distribute.Strategy`."""

import atexit
import contextlib
import faulthandler
import functools
import logging
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Sequence

# TensorFlow must not be imported before the variables that quiet it are set by the entry points.
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

from tfdist.cluster import Cluster, rendezvous
from tfdist.cluster.address import split_address
from tfdist.cluster.gpus import SeenGPUs, own_gpus
from tfdist.cluster.mpi import leave as leave_mpi
from tfdist.cluster.mpi import processes
from tfdist.cluster.variables import MONITOR
from tfdist.config import STRATEGIES, did_you_mean
from tfdist.coordination import watch_without_haste
from tfdist.cores import available_cores
from tfdist.cpu_workers import CPUWorkersStrategy
from tfdist.errors import UsageError, exit_2_on_wrong_use
from tfdist.liveness import Limits, Monitor, Pulse
from tfdist.liveness.signals import kept_handlers

_MOST_CPU_DEVICES = 256  # they are for tests; TensorFlow takes hours to make many thousands

_log = logging.getLogger("tfdist")
_pulses: "weakref.WeakKeyDictionary[tf.distribute.Strategy, Pulse]" = weakref.WeakKeyDictionary()
_made: "weakref.WeakSet[tf.distribute.Strategy]" = weakref.WeakSet()


def make_strategy(
    name: str,
    *,
    devices: "Sequence[str] | None" = None,
    num_devices: "int | None" = None,
    cluster: "Cluster | None" = None,
    start_timeout: float = 120.0,
    hang_timeout: "float | None" = None,
) -> tf.distribute.Strategy:
    """Returns the strategy that `name` stands for, with the fastest communication for its devices.

    Call it before anything touches a device. GPU memory growth is switched on first.

    Args:
        name: "one_device", "mirrored", "multi_worker", or "auto": multi_worker where the environment describes
            a cluster of more than one worker, else mirrored where there is more than one accelerator, else
            one_device.
        devices: devices of this process, such as ["GPU:0", "GPU:1"]. By default all accelerators, or the CPU. Workers
            on one host that see the same GPUs divide them first, and then each counts its own from 0.
        num_devices: how many devices to take on each worker. Without accelerators, as many logical CPU devices are
            made.
        cluster: who takes part; by default `Cluster.detect()`.
        start_timeout: seconds to wait for the other workers.
        hang_timeout: seconds after which a worker that is silent, or whose step does not move, counts as hung, and
            ends the job (see `tfdist.liveness.Limits`). It goes before what the launcher says; None takes that, or 30.

    Raises:
        UsageError: unknown name, more devices than exist, or devices that were initialised before.
        PeerError: a worker did not come up in time or disagrees; the message names it.
    """
    exit_2_on_wrong_use()
    limits = None if hang_timeout is None else Limits(hang_timeout)
    meeting = _Meeting(start_timeout, limits)
    strategy = _make(name, devices, num_devices, cluster, meeting)
    _made.add(strategy)
    monitor = _launchers_monitor() or meeting.monitor
    if monitor is not None:
        index = worker_index(strategy) if meeting.monitor else (cluster or Cluster.detect()).index
        _pulses[strategy] = _pulse(index, monitor, hang_timeout)
    return strategy


def pulse_of(strategy: tf.distribute.Strategy) -> Pulse:
    """Returns what tells the other workers what this process is doing."""
    return _pulses.setdefault(strategy, Pulse())


@functools.cache
def _launchers_monitor() -> "str | None":
    """Returns where the monitor of `tfdist launch` is. Processes that this one starts do not see it."""
    return os.environ.pop(MONITOR, None)


@functools.cache
def _pulse(index: int, monitor: str, hang_timeout: "float | None") -> Pulse:
    pulse = Pulse(index, monitor, hang_timeout, launched=_launchers_monitor() is not None)
    atexit.register(pulse.close)
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
        if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:  # which ends a process; now it says where it was first
            faulthandler.register(signal.SIGQUIT, sys.__stderr__, all_threads=True, chain=True)
    return pulse


class _Meeting:
    """How the workers of a job meet, and where they hear of each other from then on.

    Attributes:
        start_timeout: seconds to wait for the others.
        limits: how patient a monitor is that worker 0 runs.
        monitor: the address of that monitor, when they have met.
    """

    def __init__(self, start_timeout: float, limits: "Limits | None"):
        self.start_timeout = start_timeout
        self.limits = limits
        self.monitor: str | None = None

    def meet(self, cluster: Cluster, num_gpus: int) -> range:
        """Waits for the others, prepares what TensorFlow needs to work with them, and returns this worker's GPUs."""
        with contextlib.ExitStack() as until_met:

            def open_monitor(ip: str) -> str:
                name, _ = split_address(cluster.address)
                own = Monitor(cluster.workers, host=ip, name=name, limits=self.limits)
                until_met.callback(own.close)
                return own.address

            agreement = rendezvous(
                cluster,
                timeout_s=self.start_timeout,
                seed=global_seed(),
                open_monitor=open_monitor if _launchers_monitor() is None else None,
                gpus=SeenGPUs.detect(num_gpus, os.environ),
            )
            atexit.register(until_met.pop_all().close)
        self.monitor = agreement.monitor
        if global_seed() is None:
            # Every worker builds the same input pipeline: without a common seed an unseeded shuffle would give
            # each worker another order, and examples would be read twice or not at all.
            tf.random.set_seed(agreement.seed)
        os.environ["TF_CONFIG"] = cluster.tf_config()
        if processes():
            _leave_a_thread_to_wait()
        shares = cluster.index in agreement.sharing_gpus
        return own_gpus(num_gpus, cluster.local_rank, cluster.local_size) if shares else range(num_gpus)


def distributed_strategies() -> list[tf.distribute.Strategy]:
    """Returns the living strategies of this process that `make_strategy` made for more than one replica."""
    return [strategy for strategy in _made if strategy.num_replicas_in_sync > 1]


def _make(
    name: str,
    devices: "Sequence[str] | None",
    num_devices: "int | None",
    cluster: "Cluster | None",
    meeting: "_Meeting",
) -> tf.distribute.Strategy:
    if name not in STRATEGIES:
        choices = f"choose one of {', '.join(STRATEGIES)}{did_you_mean(str(name), STRATEGIES)}"
        raise UsageError(f"strategy={name!r}: {choices}")
    if num_devices is not None and num_devices < 1:
        raise UsageError(f"num_devices={num_devices}: at least 1 is needed")
    if devices is not None and num_devices is not None and len(devices) != num_devices:
        raise UsageError(f"num_devices={num_devices} and devices={list(devices)} disagree; give one of them")
    if name in ("auto", "multi_worker"):
        cluster = cluster or Cluster.detect()
    gpus = tf.config.list_physical_devices("GPU")
    if name == "auto":
        name = _choose(cluster, len(devices) if devices else num_devices, len(gpus))
    _grow_gpu_memory(gpus)
    if name == "multi_worker":
        with kept_handlers():
            return _multi_worker(cluster, devices, num_devices, len(gpus), meeting)
    wanted = list(devices) if devices else _default_devices(name, num_devices, len(gpus))
    _require_devices(wanted, name)
    if name == "one_device":
        if len(wanted) != 1:
            raise UsageError(
                f"strategy='one_device' takes one device, not {wanted}; use strategy='mirrored' for several"
            )
        return tf.distribute.OneDeviceStrategy(wanted[0])
    return tf.distribute.MirroredStrategy(wanted, cross_device_ops=_cross_device_ops(wanted))


def global_seed() -> "int | None":
    """Returns TensorFlow's global seed: set by the user, or agreed among the workers; else None."""
    return tf_context.global_seed()


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes what the job writes once: worker 0, or the only process."""
    return worker_index(strategy) == 0


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Returns this process's index in the job."""
    resolver = getattr(strategy, "cluster_resolver", None)
    return int(resolver.task_id or 0) if resolver is not None and num_workers(strategy) > 1 else 0


def worker_addresses(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the address of every worker of a job of several."""
    return list(strategy.cluster_resolver.cluster_spec().as_dict()["worker"])


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of processes in the job."""
    resolver = getattr(strategy, "cluster_resolver", None)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return 1
    return max(1, len(resolver.cluster_spec().as_dict().get("worker", [])))


def leave_together(strategy: tf.distribute.Strategy, *, timeout_s: float = 10.0) -> None:
    """Ends a job in order: the chief waits until the other workers' servers are gone, at most `timeout_s`.

    The chief serves the job's coordination. A worker that outlives it for a moment reports a lost leader, which
    looks like a failure at the end of a job that went well. Call it last, where training has succeeded.
    """
    leave_mpi()
    if num_workers(strategy) == 1 or not is_chief(strategy):
        return
    deadline = time.monotonic() + timeout_s
    for address in worker_addresses(strategy)[1:]:
        host, _, port = address.rpartition(":")
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            except OSError:
                break
            time.sleep(0.05)


def is_distributed(strategy: tf.distribute.Strategy) -> bool:
    """Whether `strategy` is one that places variables, not TensorFlow's default of no strategy at all."""
    return isinstance(
        strategy,
        tf.distribute.OneDeviceStrategy | tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy,
    )


def num_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas in this process; workers have equally many."""
    return strategy.num_replicas_in_sync // num_workers(strategy)


def _choose(cluster: Cluster, num_devices: "int | None", num_gpus: int) -> str:
    if cluster.num_workers > 1:
        name, why = "multi_worker", f"{cluster.source} describes {cluster.num_workers} workers"
    elif num_devices is not None and num_devices > 1:
        name, why = "mirrored", f"{num_devices} devices were asked for"
    elif num_gpus > 1 and num_devices is None:
        name, why = "mirrored", f"there are {num_gpus} GPUs"
    else:
        name, why = "one_device", "one worker and one device" if num_gpus else "one worker and no accelerator"
    _log.info("strategy auto: %s, because %s", name, why)
    return name


def _grow_gpu_memory(gpus: Sequence) -> None:
    for gpu in gpus:
        if tf.config.experimental.get_memory_growth(gpu):
            continue
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            raise UsageError(_INITIALISED.format(what="GPU memory growth")) from None


_INITIALISED = (
    "make_strategy: TensorFlow's devices were initialised before {what} could be set. "
    "Call tfdist.make_strategy first, before any tensor, variable, dataset iterator or list_logical_devices"
)


def _devices_are_initialised() -> bool:
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        # TensorFlow refuses this setting exactly once the devices are up; it is put back at once.
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def _default_devices(name: str, num_devices: "int | None", num_gpus: int) -> list[str]:
    if num_gpus:
        count = num_devices or (1 if name == "one_device" else num_gpus)
        if count > num_gpus:
            raise UsageError(f"num_devices={count}: there are {num_gpus} GPUs; ask for at most {num_gpus}")
        return [f"GPU:{i}" for i in range(count)]
    if num_devices and num_devices > _MOST_CPU_DEVICES:
        raise UsageError(f"num_devices={num_devices}: at most {_MOST_CPU_DEVICES} logical CPU devices can be made")
    return [f"CPU:{i}" for i in range(num_devices or 1)]


def _require_devices(wanted: Sequence[str], name: str) -> None:
    """Makes the logical CPU devices that `wanted` names, and checks that all of `wanted` exist."""
    parsed = []
    for device in wanted:
        kind, _, index = device.replace("/device:", "").replace("/", "").upper().partition(":")
        if kind not in ("CPU", "GPU") or not index.isdigit():
            raise UsageError(f"devices: {device!r} is no device; write them as 'GPU:0' or 'CPU:1'")
        parsed.append((kind, int(index)))
    if len(set(parsed)) != len(parsed):
        raise UsageError(f"devices={list(wanted)}: a device is named twice")
    num_cpus = 1 + max((index for kind, index in parsed if kind == "CPU"), default=0)
    cpu = tf.config.list_physical_devices("CPU")[0]
    if not _devices_are_initialised():
        configured = tf.config.get_logical_device_configuration(cpu)
        if num_cpus > len(configured or [None]):
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_cpus)
    elif num_cpus > len(tf.config.list_logical_devices("CPU")):
        raise UsageError(_INITIALISED.format(what=f"{num_cpus} logical CPU devices"))
    exist = {d.name.replace("/device:", "") for kind in ("CPU", "GPU") for d in tf.config.list_logical_devices(kind)}
    missing = [f"{kind}:{index}" for kind, index in parsed if f"{kind}:{index}" not in exist]
    if missing:
        raise UsageError(
            f"strategy={name!r}: no such device: {', '.join(missing)}; this machine has {', '.join(sorted(exist))}"
        )


def _cross_device_ops(devices: Sequence[str]) -> "tf.distribute.CrossDeviceOps | None":
    """NCCL on GPUs, one-device reduction on CPU devices.

    Measured on CPU devices (4 gradients, 1.6 MB; 12 gradients, 12 MB), ms: collectives 1.0 and 4.8, reduction to
    one device 0.24 and 0.45, hierarchical copy 0.21 and 0.30. Hierarchical copy gives wrong sums, silently, for
    an odd number of devices, so its small lead is not taken.
    """
    if all("GPU" in device.upper() for device in devices) and len(devices) > 1:
        return tf.distribute.NcclAllReduce()
    return tf.distribute.ReductionToOneDevice(accumulation_fn=_sum_in_order)


def _sum_in_order(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum, in the order of the replicas.

    AddN begins with whichever input's memory it may write to, which depends on timing: from three summands on, two
    runs would differ in the last bit. (A chain of additions is no way out, as it is rewritten to AddN.)
    """
    return tf.add_n(values) if len(values) < 3 else tf.reduce_sum(tf.stack(values), axis=0)


def _multi_worker(
    cluster: Cluster,
    devices: "Sequence[str] | None",
    num_devices: "int | None",
    num_gpus: int,
    meeting: "_Meeting",
) -> tf.distribute.Strategy:
    wanted = len(devices) if devices else num_devices
    if not num_gpus and wanted and wanted > _MOST_CPU_DEVICES:
        raise UsageError(f"num_devices={wanted}: at most {_MOST_CPU_DEVICES} logical CPU devices can be made")
    if num_gpus and wanted is not None and wanted > num_gpus:
        raise UsageError(f"num_devices={wanted}: there are {num_gpus} GPUs; ask for at most {num_gpus}")
    if _devices_are_initialised():
        raise UsageError(_INITIALISED.format(what="the collectives of multi_worker"))
    share = meeting.meet(cluster, num_gpus) if cluster.num_workers > 1 else range(num_gpus)
    if num_gpus:
        physical = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices([physical[i] for i in _choose_gpus(share, devices, num_devices)], "GPU")
    implementation = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=implementation.NCCL if num_gpus else implementation.RING
    )
    if cluster.num_workers == 1:
        resolver: tf.distribute.cluster_resolver.ClusterResolver = _LocalResolver()
    else:
        watch_without_haste(cluster.num_workers)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if num_gpus or wanted in (None, 1):
        return tf.distribute.MultiWorkerMirroredStrategy(resolver, communication_options=options)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * wanted)
    return CPUWorkersStrategy(wanted, resolver, options)


def _choose_gpus(share: range, devices: "Sequence[str] | None", num_devices: "int | None") -> list[int]:
    """Returns the GPUs to use out of this worker's share, which `devices` and `num_devices` count from 0."""
    places = [int(device.rpartition(":")[2]) for device in devices] if devices else range(num_devices or len(share))
    if max(places) >= len(share):
        given = f"devices={list(devices)}" if devices else f"num_devices={num_devices}"
        raise UsageError(
            f"{given}: this worker's share of its host's GPUs has {len(share)}; name GPU:0 to GPU:{len(share) - 1}, "
            f"ask for at most {len(share)}, or start fewer workers on the host"
        )
    return [share[place] for place in places]


def _leave_a_thread_to_wait() -> None:
    """Makes sure that the backward pass goes on while one of TensorFlow's threads waits for MPI."""
    threads = tf.config.threading.get_inter_op_parallelism_threads() or available_cores()
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))


class _LocalResolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """A cluster of this process alone."""

    def __init__(self):
        super().__init__(tf.train.ClusterSpec({}))
