"""TensorFlow's own server takes the ports right after the rendezvous, in real processes."""

import io
import re

import pytest

from tfdist.launch import launch

_SCRIPT = """
import tensorflow as tf
from tfdist.cluster import Cluster, rendezvous
seed = rendezvous(Cluster.detect(), timeout_s=60).seed
strategy = tf.distribute.MultiWorkerMirroredStrategy()
total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)
print(f"total {float(total)} seed {seed}")
"""


@pytest.mark.timeout(120)
def test_multi_worker_strategy_starts_on_the_same_ports(tmp_path):
    (tmp_path / "script.py").write_text(_SCRIPT)
    output = io.BytesIO()
    code = launch(2, [str(tmp_path / "script.py")], stdout=output)
    text = output.getvalue().decode()
    assert code == 0, text
    found = re.findall(r"\[worker (\d)\] total 2.0 seed (\d+)", text)
    assert sorted(worker for worker, _ in found) == ["0", "1"], text
    assert found[0][1] == found[1][1]
