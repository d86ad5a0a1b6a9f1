"""Slurm's variables: node lists against hand-written ones, places of ranks, and malformed values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster import Cluster
from tfdist.cluster.slurm import expand_counts, expand_nodes
from tfdist.errors import UsageError


def task(rank=0, node=0, local=0, **options):
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[08-09]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        **options,
    }


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", ["n1"]),
        ("n[01-03,07]", ["n01", "n02", "n03", "n07"]),
        ("a,b-2.site,c[9-11]x", ["a", "b-2.site", "c9x", "c10x", "c11x"]),
        ("r[0-1]n[1,3]", ["r0n1", "r0n3", "r1n1", "r1n3"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_node_lists(text, nodes):
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(
    "text", ["", ",", "n[", "n]", "n[]", "n[3-1]", "n[1-]", "n[a]", "n[1,1]", "a b", "n[1[2]]", "n[0-999999999]", "a,a"]
)
def test_no_node_lists(text):
    with pytest.raises(UsageError, match="is no list of nodes such as"):
        expand_nodes(text)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=4))
def test_ranges_come_out_as_they_went_in(ranges):
    names = [f"h{i}-{n:03}" for i, (first, more) in enumerate(ranges) for n in range(first, first + more + 1)]
    text = ",".join(f"h{i}-[{first:03}-{first + more:03}]" for i, (first, more) in enumerate(ranges))
    assert expand_nodes(text) == names


def test_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1] and expand_counts("4") == [4]
    for text in ("", "2(x)", "x2", "2(x3", "-1", "1(x9999999)"):
        with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE"):
            expand_counts(text)


def test_all_tasks_agree_on_the_workers():
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = [Cluster.detect(task(rank, *place)) for rank, place in enumerate(places)]
    assert [cluster.index for cluster in found] == [0, 1, 2, 3]
    assert len({cluster.workers for cluster in found}) == 1 and found[0].source == "Slurm"
    hosts, ports = zip(*(worker.split(":") for worker in found[0].workers), strict=True)
    assert hosts == ("n08", "n08", "n09", "n09")
    assert ports[0] == ports[2] and int(ports[1]) == int(ports[0]) + 1


def test_cyclic_and_one_node():
    cyclic = task(1, 1, 0, SLURM_DISTRIBUTION="cyclic")
    assert [w.split(":")[0] for w in Cluster.detect(cyclic).workers] == ["n08", "n09", "n08", "n09"]
    with pytest.raises(UsageError, match="--distribution=block"):
        Cluster.detect(task(1, 1, 0))
    one = task(1, 0, 1, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="n08", SLURM_STEP_TASKS_PER_NODE="2")
    assert [w.split(":")[0] for w in Cluster.detect(one).workers] == ["127.0.0.1"] * 2


def test_more_tasks_than_ports():
    many = task(SLURM_STEP_NUM_TASKS="60000", SLURM_STEP_NODELIST="n08", SLURM_STEP_TASKS_PER_NODE="60000")
    with pytest.raises(UsageError, match="at most 1000 tasks on a node"):
        Cluster.detect(many)


def test_steps_and_jobs_have_ports_of_their_own():
    jobs = [task(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in (77, 78) for step in (0, 1)]
    assert len({Cluster.detect(job).workers[0] for job in jobs}) == 4


def test_who_is_no_task_of_several():
    assert Cluster.detect(task(SLURM_STEP_NUM_TASKS="1")).is_local
    batch = {name: value for name, value in task().items() if "STEP" not in name}
    assert Cluster.detect({**batch, "SLURM_NTASKS": "4"}).is_local
    own = '{"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": 0}}'
    assert Cluster.detect(task(TF_CONFIG=own)).source == "TF_CONFIG"


@given(
    st.dictionaries(
        st.sampled_from(sorted(task())),
        st.one_of(st.none(), st.text(max_size=12), st.sampled_from(["-1", "0", "3", "999", "n[1-4]", "1(x4)", "4"])),
        min_size=1,
    )
)
def test_malformed_variables_give_a_cluster_or_a_clear_error(changes):
    environ = {**task(), **changes}
    environ = {name: value for name, value in environ.items() if value is not None}
    try:
        cluster = Cluster.detect(environ)
    except UsageError as error:
        assert str(error)
        return
    assert cluster.is_local or 0 <= cluster.index < cluster.num_workers
