"""Reads the cluster from TF_CONFIG, the variable that TensorFlow's own strategies read."""

import json
from collections.abc import Mapping

from tfdist.cluster.address import check_addresses, shorten
from tfdist.cluster.base import Cluster, ClusterEnvironment
from tfdist.errors import UsageError

VARIABLE = "TF_CONFIG"
_EXAMPLE = '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}'
_TRAINING_JOBS = ("chief", "worker")
_OTHER_JOBS = {
    "ps": "parameter servers are not supported: list every process under 'worker'",
    "evaluator": "evaluator processes are not supported: the workers evaluate together, so leave it out",
    "master": "'master' is the name of TensorFlow 1: write 'chief'",
}


class TFConfigEnvironment(ClusterEnvironment):
    """TF_CONFIG, set by hand, by `tfdist launch`, by Kubeflow or by a cloud's training service."""

    @property
    def name(self) -> str:
        """The name for messages."""
        return VARIABLE

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Says whether TF_CONFIG is set and not blank.

        Args:
            environ: The environment variables.

        Returns:
            True if there is something to read.
        """
        return bool(environ.get(VARIABLE, "").strip())

    def read(self, environ: Mapping[str, str]) -> Cluster:
        """Reads TF_CONFIG.

        The chief, where there is one, becomes worker 0 and the others follow.

        Args:
            environ: The environment variables.

        Returns:
            The cluster.

        Raises:
            UsageError: If TF_CONFIG is malformed; the message says what is wrong with which value.
        """
        text = environ.get(VARIABLE, "")
        try:
            return _parse(text)
        except UsageError as error:
            raise UsageError(
                f"{VARIABLE}={shorten(text)}: {error}. It has to look like {_EXAMPLE}; unset it to train on "
                "this machine alone"
            ) from None


def _parse(text: str) -> Cluster:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is not JSON ({shorten(str(error), 100)})") from None
    config = _object(config, "the whole")
    if "cluster" not in config:
        raise UsageError("'cluster' is missing: it has to list the workers' addresses")
    if "task" not in config:
        raise UsageError("'task' is missing: it has to say which worker this process is")
    chief, workers = _addresses(_object(config["cluster"], "'cluster'"))
    index = _index(_object(config["task"], "'task'"), chief, workers)
    return Cluster(workers=tuple(chief + workers), index=index, source=VARIABLE)


def _object(value: object, where: str) -> dict:
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {shorten(value, 80)}, but has to be a JSON object {{...}}")
    return value


def _addresses(cluster: dict) -> tuple[list[str], list[str]]:
    """Returns the address of the chief (none or one) and those of the other workers."""
    for job, addresses in cluster.items():
        if not isinstance(addresses, list) or not addresses:
            raise UsageError(
                f"'cluster' gives {shorten(job, 80)} as {shorten(addresses, 80)}, but it has to be a list of "
                "at least one address"
            )
        if job not in _TRAINING_JOBS:
            raise UsageError(f"'cluster' lists {shorten(job, 80)}: {_refusal(job)}")
    chief, workers = cluster.get("chief", []), cluster.get("worker", [])
    if len(chief) > 1:
        raise UsageError(f"'cluster' lists {len(chief)} chiefs {shorten(chief, 80)}, but there can be only one")
    if not chief and not workers:
        raise UsageError("'cluster' lists no worker: it has to have a list 'worker' with one address or more")
    check_addresses(chief + workers)
    return chief, workers


def _index(task: dict, chief: list[str], workers: list[str]) -> int:
    """Returns this process's place in the list of the chief and the workers."""
    jobs = {"chief": chief, "worker": workers}
    kind = task.get("type")
    if not isinstance(kind, str) or kind not in jobs:
        raise UsageError(f"'task' has the type {shorten(kind, 80)}: {_refusal(kind)}")
    if "index" not in task:
        raise UsageError("'task' has no 'index': it has to be this process's place in its list, from 0")
    index = task["index"]
    if not isinstance(index, int) or isinstance(index, bool):
        raise UsageError(
            f"'task' has the index {shorten(index, 80)}, but it has to be an integer such as 0 (no quotes)"
        )
    if not jobs[kind]:
        raise UsageError(f"'task' says this is a {kind}, but 'cluster' has no list '{kind}'")
    if not 0 <= index < len(jobs[kind]):
        raise UsageError(
            f"'task' has the index {shorten(index, 80)}, but 'cluster' lists {len(jobs[kind])} of type "
            f"'{kind}': it has to be from 0 to {len(jobs[kind]) - 1}"
        )
    return index if kind == "chief" else len(chief) + index


def _refusal(job: object) -> str:
    reason = _OTHER_JOBS.get(job) if isinstance(job, str) else None
    return reason or "only 'chief' and 'worker' are allowed"
