"""What all tests share. Importing this costs nothing: TensorFlow comes only with `cpu_devices`."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity import Parity

_ROOT = Path(__file__).resolve().parents[1]

# Processes that tests start find this copy of tfdist, and whatever else this process was told to use.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["KERAS_BACKEND"] = "tensorflow"
# A shell starts a command in the background with these ignored. Processes that tests start and signal would inherit it.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

_NUM_CPU_DEVICES = 4


@pytest.fixture
def wait_until() -> Callable[[Callable[[], object]], None]:
    """Waits for a condition, 20 s at most."""

    def wait(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not become true"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def cpu_devices() -> list[str]:
    """Splits the CPU into four logical devices, once for the whole run; returns their names.

    The devices are fixed once TensorFlow has run anything, so whichever test comes first has to ask for them.
    """
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * _NUM_CPU_DEVICES)
    except RuntimeError:  # initialised already: accept it if the devices are there all the same
        pass
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    if len(names) != _NUM_CPU_DEVICES:
        raise RuntimeError(f"TensorFlow was used before the fixture cpu_devices: it has {names}")
    return names


@pytest.fixture(scope="session")
def strategies(cpu_devices: list[str]) -> dict[str, Any]:
    """One strategy of each kind over logical CPU devices."""
    import tfdist

    made = {"one_device": tfdist.make_strategy("one_device")}
    for count in (2, 3, 4):
        made[f"mirrored{count}"] = tfdist.make_strategy("mirrored", num_devices=count)
    return made


@pytest.fixture(scope="session")
def copy_of_repository() -> Callable[[Path], Path]:
    """Copies what git knows of, as it is now, into a folder, and returns it."""

    def copy(folder: Path) -> Path:
        known = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, check=True).stdout
        for name in map(os.fsdecode, filter(None, known.split(b"\0"))):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, folder / name)
        return folder

    return copy


@pytest.fixture
def parity(strategies: dict[str, Any]) -> Parity:
    """See `Parity`."""
    return Parity(strategies)
