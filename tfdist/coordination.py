"""TensorFlow's own watch over the workers, which must not be quicker than tfdist's.

The one place that relies on how MultiWorkerMirroredStrategy sets up its coordination service
(`tests/test_strategy.py::test_what_coordination_relies_on`).
"""

from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

_HEARTBEAT_S = 7 * 24 * 3600


def watch_without_haste(num_workers: int) -> None:
    """Lets TensorFlow's coordination service be patient; to be called before the strategy is made.

    By itself it ends the job about 10 s after a worker was stopped or cut off, whatever `hang_timeout` says, and tells
    neither who that was nor what the others were doing. A connection that breaks is still noticed at once.

    Args:
        num_workers: workers of the job, each listed with the type "worker".
    """
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=_HEARTBEAT_S * 1000,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=num_workers)],
    )
