"""Environments with up to two wrong variables: the cluster of an oracle, or an error that names one of them.

Each test draws a well-formed job as pairs of a text and its meaning, then replaces some of them by others, whose
meaning is known too: None where the text is malformed. The oracle reads only meanings, and never a text.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.cluster import Cluster
from tfdist.cluster.mpi import mpi, place, processes
from tfdist.errors import UsageError

generated = settings(max_examples=100, deadline=2000)  # milliseconds for each


@dataclass(frozen=True)
class Told:
    """What a variable says.

    Attributes:
        text: The variable's value; None leaves it unset.
        meaning: What it means; None where it means nothing.
    """

    text: object
    meaning: object = None


MALFORMED = st.sampled_from(
    [None, "", " ", "x", "-1", "+1", "1.5", "1e3", "0x1", "1 2", "null", "[]", "'1'", "٣", "２", "½", "🦄", "1\n2"]
    + ["1\x00", "9" * 25, "9" * 5000, "a" * 100_000, "{}", "%s", "$X"]
).map(Told)
NUMBERS = st.integers(0, 7).map(lambda number: Told(str(number), number)) | MALFORMED


def changed(
    draw: st.DrawFn, told: Mapping[str, Told], others: Mapping[str, st.SearchStrategy[Told]]
) -> dict[str, Told]:
    """Replaces up to two of the variables."""
    names = draw(st.lists(st.sampled_from(sorted(others)), max_size=2, unique=True))
    return {**told, **{name: draw(others[name]) for name in names}}


def texts(told: Mapping[str, Told]) -> dict[str, str]:
    return {name: one.text for name, one in told.items() if one.text is not None}


def detect(told: Mapping[str, Told], original: Mapping[str, Told]) -> Cluster | None:
    """Returns the cluster; None for an error, which has to be short and to name a variable that was changed."""
    try:
        return Cluster.detect(texts(told))
    except UsageError as error:
        wrong = [name for name in told if told[name] != original[name]]
        assert any(name in str(error) for name in wrong), f"{wrong}: {error}"
        assert len(str(error)) < 1500
        return None


# Kubernetes

HOSTS = st.one_of(
    st.sampled_from(["train-workers-0-{}.train", "w{}", "{}.x"]).map(lambda text: Told(text, text.split("{}"))),
    st.sampled_from(["w", "{}{}", "w {}", "{", "w{0}", "ü{}", "w{}/", "w{}:1", "x" * 260 + "{}"]).map(Told),
    MALFORMED.filter(lambda told: told.text != "{}"),
)
PORTS = st.sampled_from([Told("1", 1), Told("65535", 65535), Told("0"), Told("65536")]) | MALFORMED


@st.composite
def kubernetes(draw: st.DrawFn) -> tuple[dict[str, Told], dict[str, Told]]:
    count = draw(st.integers(1, 6))
    index = draw(st.integers(0, count - 1))
    told = {
        "TFDIST_WORKERS": Told(str(count), count),
        "JOB_COMPLETION_INDEX": Told(str(index), index),
        "TFDIST_WORKER_HOST": Told("train-workers-0-{}.train", ["train-workers-0-", ".train"]),
        "TFDIST_PORT": Told("2222", 2222),
    }
    others = dict(zip(told, (NUMBERS, NUMBERS, HOSTS, PORTS), strict=True))
    return told, changed(draw, told, others)


@generated
@given(kubernetes())
def test_kubernetes(pods):
    original, told = pods
    count, index, host, port = (one.meaning for one in told.values())
    found = detect(told, original)
    if told["TFDIST_WORKERS"].text is None or told["JOB_COMPLETION_INDEX"].text is None:
        assert found == Cluster.local()
    elif None in (count, index, host, port) or not index < count:
        assert found is None
    else:
        workers = tuple(f"{host[0]}{worker}{host[1]}:{port}" for worker in range(count))
        assert found == Cluster(workers, index, "Kubernetes")


# Slurm

NODES = [
    Told("n1", ["n1"]),
    Told("n[1-2]", ["n1", "n2"]),
    Told("a-[08-10],b", ["a-08", "a-09", "a-10", "b"]),
    Told("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
]
NO_NODES = [",", "n[", "n]", "n[2-1]", "n[1,1]", "ñ[1-2]", "n 1", "n[0-999999999]", "n" + "[0-99999]" * 3]
NO_NODES += [",".join(["n[" + ",".join(["0-99999"] * 500) + "]"] * 3)]
COUNTS = [Told("1", [1]), Told("2", [2]), Told("2(x2)", [2, 2]), Told("1(x3),3", [1, 1, 1, 3]), Told("2,1", [2, 1])]
COUNTS += [Told("1(x4)", [1] * 4)]
NO_COUNTS = [",", "2(x", "2(x0", "-1", "0", "2(xx)", "1(x999999999)", "1,,1", "٢(x2)"]


def _places(counts: list[int]) -> list[tuple[int, int, int]]:
    """Returns rank, node and place there of every task."""
    return [(sum(counts[:node]) + task, node, task) for node, count in enumerate(counts) for task in range(count)]


@st.composite
def slurm(draw: st.DrawFn) -> tuple[dict[str, Told], dict[str, Told]]:
    nodes, counts = draw(
        st.sampled_from(
            [pair for pair in itertools.product(NODES, COUNTS) if len(pair[0].meaning) == len(pair[1].meaning)]
        )
    )
    rank, node, task = draw(st.sampled_from(_places(counts.meaning)))
    numbers = {
        "SLURM_STEP_NUM_TASKS": sum(counts.meaning),
        "SLURM_PROCID": rank,
        "SLURM_NODEID": node,
        "SLURM_LOCALID": task,
        "SLURM_JOB_ID": draw(st.integers(1, 10**7)),
        "SLURM_STEP_ID": draw(st.integers(0, 9)),
    }
    told = {name: Told(str(number), number) for name, number in numbers.items()}
    others = dict.fromkeys(told, NUMBERS)
    others["SLURM_STEP_NODELIST"] = st.sampled_from(NODES + [Told(text) for text in [None, "", " ", *NO_NODES]])
    others["SLURM_STEP_TASKS_PER_NODE"] = st.sampled_from(COUNTS + [Told(text) for text in [None, "x", *NO_COUNTS]])
    told |= {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": counts}
    return told, changed(draw, told, others)


@generated
@given(slurm())
def test_slurm(tasks):
    original, told = tasks
    number, rank, node, local, job, step, nodes, counts = (one.meaning for one in told.values())
    found = detect(told, original)
    if told["SLURM_PROCID"].text is None or told["SLURM_STEP_NUM_TASKS"].text in (None, "1"):
        assert found == Cluster.local()
    elif None in (number, rank, node, local, job, step, nodes, counts):
        assert found is None
    elif (
        len(nodes) != len(counts)
        or number != sum(counts)
        or rank >= number
        or (rank, node, local) not in _places(counts)
    ):
        assert found is None
    else:
        assert (found.source, found.index, found.num_workers) == ("Slurm", rank, number)
        hosts = [worker.rpartition(":")[0] for worker in found.workers]
        named = [name for name, count in zip(nodes, counts, strict=True) for _ in range(count)]
        assert hosts == (named if len(nodes) > 1 else ["127.0.0.1"] * number)
        assert (found.local_rank, found.local_size) == (local, counts[node])


# MPI: what is read before MPI itself would be started.

MPI_VARIABLES = st.sampled_from([("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])


@st.composite
def mpi_processes(draw: st.DrawFn) -> tuple[dict[str, Told], dict[str, Told]]:
    size = draw(st.integers(1, 5))
    rank = draw(st.integers(0, size - 1))
    told = dict(zip(draw(MPI_VARIABLES), (Told(str(rank), rank), Told(str(size), size)), strict=True))
    return told, changed(draw, told, dict.fromkeys(told, NUMBERS))


@generated
@given(mpi_processes(), st.sampled_from([{}, {"MPI_LOCALRANKID": "0"}, {"MPI_LOCALRANKID": "x"}]))
def test_mpi(ranks, more):
    original, told = ranks
    environ = {**texts(told), **more}
    rank, size = (one.meaning for one in told.values())
    if not any((one.text or "").strip() for one in told.values()):
        assert place(environ) is None and processes(environ) == 0
        assert detect(told, original) == Cluster.local()
    elif None in (rank, size) or rank >= size:
        assert processes(environ) == 0
        assert detect(told, original) is None
    else:
        assert place(environ) == (rank, size) and processes(environ) == size
        if size == 1:
            assert detect(told, original) == Cluster.local()
    assert not mpi.cache_info().currsize


# TF_CONFIG

ADDRESSES = st.sampled_from(
    [Told(["a:1"], ["a:1"]), Told(["a:1", "b:2"], ["a:1", "b:2"]), Told(["[::1]:5", "[::1]:6"], ["[::1]:5", "[::1]:6"])]
    + [Told(value) for value in ([], {}, "a:1", 1, None, ["a"], ["a:0"], ["a:65536"], ["a:x"], [1], [None], [["a:1"]])]
    + [Told(value) for value in (["a:1", "A:1"], ["ü:1"], ["a:٣"], ["a b:1"], ["a:1" * 10**5], {"0": "a:1"})]
)
CHIEFS = st.sampled_from([Told(["c:1"], ["c:1"]), Told(["c:1", "d:1"]), Told([]), Told("c:1"), Told({"0": "c:1"})])
KINDS = st.sampled_from(
    [Told("chief", "chief"), Told("worker", "worker")]
    + [Told(value) for value in ("ps", "evaluator", "Worker", "", 0, None, ["worker"], {})]
)
INDICES = st.integers(0, 3).map(lambda index: Told(index, index)) | st.sampled_from(
    [Told(value) for value in ("0", 0.0, True, None, [0], {}, -1, 10**30, float("nan"))]
)


@st.composite
def tf_config(draw: st.DrawFn) -> tuple[dict[str, Told], dict[str, Told]]:
    workers = draw(ADDRESSES.filter(lambda told: told.meaning))
    index = draw(st.integers(0, len(workers.meaning) - 1))
    told = {"worker": workers, "kind": Told("worker", "worker"), "index": Told(index, index), "text": Told("", "whole")}
    others = {"worker": ADDRESSES, "chief": CHIEFS, "kind": KINDS, "index": INDICES}
    others["text"] = st.sampled_from(["cut", "list", "twice", "null", "no task", "no cluster", "unquoted"]).map(Told)
    return told, changed(draw, told, others)


def _config(told: Mapping[str, Told]) -> str:
    cluster = {job: told[job].text for job in ("worker", "chief") if job in told}
    config = {"cluster": cluster, "task": {"type": told["kind"].text, "index": told["index"].text}}
    text = json.dumps(config)
    wrong = {
        "": text,
        "cut": text[:-1],
        "list": f"[{text}]",
        "twice": text * 2,
        "null": "null",
        "no task": json.dumps({"cluster": cluster}),
        "no cluster": json.dumps({"task": config["task"]}),
        "unquoted": text.replace('"', ""),
    }
    return wrong[told["text"].text]


@generated
@given(tf_config())
def test_tf_config(jobs):
    _, told = jobs
    found = detect({"TF_CONFIG": Told(_config(told))}, {"TF_CONFIG": Told("")})
    meanings = {name: one.meaning for name, one in told.items()}
    chiefs = meanings.get("chief", [])
    if None in (*meanings.values(), chiefs):
        assert found is None
    elif meanings["index"] >= len(chiefs if meanings["kind"] == "chief" else meanings["worker"]):
        assert found is None
    else:
        index = meanings["index"] + (len(chiefs) if meanings["kind"] == "worker" else 0)
        assert found == Cluster((*chiefs, *meanings["worker"]), index, "TF_CONFIG")
