"""The variables of a pod of an Indexed Job or JobSet."""

import pytest

from tfdist.cluster import Cluster
from tfdist.errors import UsageError


def pod(index: object = 0, **options: str) -> dict[str, str]:
    return {
        "JOB_COMPLETION_INDEX": str(index),
        "TFDIST_WORKERS": "4",
        "TFDIST_WORKER_HOST": "train-workers-0-{}.train",
        "TFDIST_PORT": "2222",
        **options,
    }


def test_all_pods_agree_on_the_workers():
    found = [Cluster.detect(pod(index)) for index in range(4)]
    workers = tuple(f"train-workers-0-{index}.train:2222" for index in range(4))
    assert found == [Cluster(workers, index, "Kubernetes") for index in range(4)]
    assert (found[3].local_rank, found[3].local_size) == (0, 1)


def test_one_pod():
    assert Cluster.detect(pod(TFDIST_WORKERS="1")).workers == ("train-workers-0-0.train:2222",)


def test_an_indexed_job_may_be_something_else():
    assert Cluster.detect({"JOB_COMPLETION_INDEX": "3"}).is_local
    assert Cluster.detect({name: value for name, value in pod().items() if name != "JOB_COMPLETION_INDEX"}).is_local


def test_tf_config_comes_first_and_slurm_later():
    own = '{"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": 0}}'
    assert Cluster.detect(pod(TF_CONFIG=own)).source == "TF_CONFIG"
    assert Cluster.detect(pod(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2")).source == "Kubernetes"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"TFDIST_WORKERS": "0"}, "TFDIST_WORKERS='0': an integer from 1 to 100000"),
        ({"TFDIST_WORKERS": ""}, "TFDIST_WORKERS='': an integer"),
        ({"TFDIST_WORKERS": "four"}, "TFDIST_WORKERS='four': an integer"),
        ({"TFDIST_WORKERS": "٤"}, "TFDIST_WORKERS="),
        ({"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4 is no worker of TFDIST_WORKERS=4: from 0 to 3"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX='-1': an integer from 0 to 99999"),
        ({"TFDIST_PORT": "70000"}, "TFDIST_PORT='70000': an integer from 1 to 65535"),
        ({"TFDIST_WORKER_HOST": "train"}, "TFDIST_WORKER_HOST='train': a host name with {}"),
        ({"TFDIST_WORKER_HOST": ""}, "TFDIST_WORKER_HOST='': a host name with {} in the place of the worker's index"),
        ({"TFDIST_WORKER_HOST": "a{}b{}"}, "TFDIST_WORKER_HOST='a{}b{}': a host name"),
        ({"TFDIST_WORKER_HOST": "a b{}"}, "TFDIST_WORKER_HOST='a b{}': a host name"),
        ({"TFDIST_WORKER_HOST": "x" * 300 + "{}"}, "TFDIST_WORKER_HOST="),
    ],
)
def test_refuses(options, said):
    with pytest.raises(UsageError) as raised:
        Cluster.detect(pod(**options))
    assert said in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.parametrize("name", ["TFDIST_PORT", "TFDIST_WORKER_HOST"])
def test_names_what_is_missing(name):
    environ = pod()
    del environ[name]
    with pytest.raises(UsageError, match=name):
        Cluster.detect(environ)
