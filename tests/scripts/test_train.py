"""scripts/train.py from the command line: the same numbers whatever the strategy, resuming, the summary, exit codes."""

import json
import os
import socket

import pytest

MLP = ("--model=mlp", "--data=digits", "--steps=12", "--global_batch_size=48", "--seed=3")
SUMMARY = {
    "strategy",
    "num_workers",
    "num_replicas",
    "global_batch_size",
    "hook",
    "transport",
    "steps",
    "examples_per_second",
    "step_time_ms",
    "first_loss",
    "final_loss",
    "final_metrics",
    "weights_sha256",
    "restarts",
    "peak_memory_mb",
}


@pytest.mark.slow
def test_two_runs_of_one_configuration_give_the_same_weights(train):
    first, second = (train(*MLP, "--strategy=mirrored", "--num_devices=2") for _ in range(2))
    assert set(first) == SUMMARY | {"stdout", "stderr"}
    assert set(first["step_time_ms"]) == {"median", "p95"}
    assert (first["strategy"], first["num_workers"], first["num_replicas"], first["steps"]) == ("mirrored", 1, 2, 12)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["final_loss"] < first["first_loss"] or first["first_loss"] == first["final_loss"]
    assert first["examples_per_second"] > 0 and first["peak_memory_mb"] > 0
    other = train(*MLP[:-1], "--seed=4", "--strategy=mirrored", "--num_devices=2")
    assert other["weights_sha256"] != first["weights_sha256"]


def test_strategies_and_loops_agree(train):
    """Losses and metrics of one device, two devices and two workers, with fit and the custom loop."""
    runs = {
        "one_device": train(*MLP, "--strategy=one_device"),
        "mirrored": train(*MLP, "--strategy=mirrored", "--num_devices=2"),
        "multi_worker": train(*MLP, "--strategy=multi_worker", workers=2),
        "custom": train(*MLP, "--strategy=one_device", "--loop=custom", "--steps_per_loop=4"),
        "custom multi_worker": train(*MLP, "--strategy=multi_worker", "--loop=custom", workers=2),
    }
    expected = runs["one_device"]["final_metrics"]
    assert expected["test_accuracy"] > 0.3
    for name, run in runs.items():
        assert run["steps"] == 12, name
        for metric in ("test_loss", "test_accuracy"):
            assert run["final_metrics"][metric] == pytest.approx(expected[metric], rel=1e-4), (name, metric)
    assert runs["one_device"]["weights_sha256"] == runs["custom"]["weights_sha256"]
    assert runs["multi_worker"]["num_workers"] == 2
    assert runs["multi_worker"]["stdout"].count("test accuracy") == 1


@pytest.mark.parametrize("loop", ["fit", pytest.param("custom", marks=pytest.mark.slow)])
def test_a_run_that_was_cut_short_goes_on_to_the_same_weights(train, tmp_path, loop):
    every = (*MLP, f"--loop={loop}", "--model_config=dropout=0.3", "--strategy=mirrored", "--num_devices=2")
    kept = ("--checkpoint_dir=kept", "--checkpoint_every=3", "--keep_checkpoints=2")
    unbroken = train(*every)
    train(*every, *kept, "--steps=7")
    assert sorted(os.listdir(tmp_path / "kept")) == ["step-00000006", "step-00000007"]
    resumed = train(*every, *kept, "--resume=must")
    assert resumed["weights_sha256"] == unbroken["weights_sha256"]
    assert "checkpoint: kept/step-00000012" in resumed["stdout"]


def test_a_function_of_the_users_and_a_tensorboard_log(train, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras, numpy as np, tensorflow as tf\n"
        "def model(width=4):\n"
        "    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(width), keras.layers.Dense(5)])\n"
        "def data(batch_size):\n"
        "    return np.zeros((20, 3), 'float32'), np.arange(20) % 5\n"
    )
    found = train("--model=mine:model", "--model_config=width=6", "--data=mine:data", "--epochs=2", "--log_dir=log")
    assert found["steps"] == 2 and list((tmp_path / "log").rglob("events*"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model=mpl",), ["--model='mpl'", "did you mean 'mlp'"]),
        (("--data=digit",), ["--data='digit'", "did you mean 'digits'"]),
        (("--data=bytes:/no/such/file",), ["there is no file or folder '/no/such/file'"]),
        (("--data=tfrecord:*.none",), ["no file matches '*.none'"]),
        (("--optimizer=adamm",), ["--optimizer='adamm'", "did you mean 'adam'"]),
        (("--strategy=mirored",), ["--strategy", "mirored", "mirrored"]),
        (("--global_batch_size=0",), ["--global_batch_size=0"]),
        (("--strategy=mirrored", "--num_devices=1000"), ["num_devices=1000", "at most 256"]),
        (("--strategy=multi_worker", "--num_devices=1000"), ["num_devices=1000", "at most 256"]),
        (("--model_config=classes=4",), ["--model_config: classes=4", "the labels go from 0 to 9"]),
        (("--model_config=widht=4",), ["widht", "width"]),
        (("--checkpoint_dir=none", "--resume=must"), ["there is no whole checkpoint in 'none'"]),
        (("--hook=alreduce",), ["alreduce", "allreduce"]),
        (("--transport=mpj",), ["--transport='mpj'", "auto, collective", "did you mean 'mpi'"]),
        (("--transport=mpi",), ["--transport='mpi'", "was not started under MPI", "tfdist launch --mpi"]),
    ],
)
def test_wrong_use_is_exit_code_2_and_says_what_to_do(train, args, words):
    found = train(*MLP, *args, code=2)
    assert found["stderr"].splitlines()[-1].startswith("error: ")
    for word in words:
        assert word in found["stderr"], found["stderr"]
    assert "Traceback" not in found["stderr"]


def cluster(addresses, index):
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{'cluster'", "not JSON"),
        ('{"cluster": {"worker": ["a:1"]}}', "'task' is missing"),
        ('{"task": {"type": "worker", "index": 0}}', "'cluster' is missing"),
        (cluster(["127.0.0.1:1", "127.0.0.1:2"], 2), "index"),
        (cluster(["127.0.0.1:2", "127.0.0.1:2"], 0), "127.0.0.1:2"),
        (cluster(["203.0.113.7:2", "127.0.0.1:2"], 0), "203.0.113.7 is not an address of this machine"),
    ],
)
def test_a_wrong_tf_config_is_exit_code_2(train, config, words):
    found = train(*MLP, "--strategy=multi_worker", code=2, TF_CONFIG=config)
    assert "TF_CONFIG" in found["stderr"] and words in found["stderr"]
    assert "Traceback" not in found["stderr"]


def test_a_port_in_use_is_exit_code_2(train):
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in (taken, free)]
        found = train(*MLP, "--strategy=multi_worker", code=2, TF_CONFIG=cluster(addresses, 0))
    assert addresses[0] in found["stderr"] and "in use" in found["stderr"]


def test_a_worker_that_never_comes_up_is_named_within_the_timeout(train):
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in (one, two)]
        one.close()
        found = train(
            *MLP, "--strategy=multi_worker", "--start_timeout=2", code=1, TF_CONFIG=cluster(addresses, 0), timeout=60
        )
    assert addresses[1] in found["stderr"] and "worker 1" in found["stderr"]
    assert "Traceback" not in found["stderr"]


def test_a_run_over_mpi_gives_the_weights_of_one_over_collectives(train):
    options = (*MLP, "--strategy=multi_worker", "--steps=4", "--loop=custom", "--seed=3")
    found = {name: train(*options, f"--transport={name}", workers=2, mpi=True) for name in ("mpi", "collective")}
    assert [run["transport"] for run in found.values()] == ["mpi", "collective"]
    assert found["mpi"]["weights_sha256"] == found["collective"]["weights_sha256"]
