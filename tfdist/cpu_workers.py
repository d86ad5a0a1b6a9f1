"""Workers with several CPU replicas each, which TensorFlow makes with GPUs only.

The one place that relies on how MultiWorkerMirroredStrategy finds its local devices
(`tests/test_strategy.py::test_what_cpu_workers_rely_on`).
"""

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended


class CPUWorkersStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """A MultiWorkerMirroredStrategy with `num_devices` logical CPU devices on each worker; they exist already.

    What several GPUs on each of several workers do can be tried and tested with it.

    Args:
        num_devices: replicas of each worker.
        cluster_resolver: the workers.
        options: how they communicate.
    """

    def __init__(
        self,
        num_devices: int,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        options: tf.distribute.experimental.CommunicationOptions,
    ):
        extended = _extended(num_devices)(self, cluster_resolver=cluster_resolver, communication_options=options)
        tf.distribute.Strategy.__init__(self, extended)


def _extended(num_devices: int) -> type:
    class Extended(CollectiveAllReduceExtended):
        def _initialize_local_devices(self, cluster_resolver: object, worker_device: str) -> tuple:
            del cluster_resolver
            return tuple(f"{worker_device}/device:CPU:{i}" for i in range(num_devices)), "CPU"

    return Extended
