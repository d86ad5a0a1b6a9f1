"""The flags of scripts/train.py: what they become, what is refused, and the exit codes."""

import dataclasses
import subprocess
import sys

import pytest
from absl import flags as absl_flags
from hypothesis import given
from hypothesis import strategies as st

from tfdist import config, flags
from tfdist.errors import UsageError

_NEEDED = ("--model=mlp", "--data=digits")


def _parse(*args: str, needed: tuple[str, ...] = _NEEDED) -> config.TrainConfig:
    values = absl_flags.FlagValues()
    flags.define(values)
    values(["train.py", *needed, *args])
    return flags.parse(values)


def test_defaults():
    found = _parse()
    assert found.devices == config.DeviceConfig("auto", None, 120.0)
    assert found.model == config.ModelConfig("mlp", {})
    assert found.data == config.DataConfig("digits", 64)
    assert (found.loop.kind, found.loop.epochs, found.loop.steps, found.loop.steps_per_loop) == ("fit", 1, None, 1)
    assert found.optimizer == config.OptimizerConfig("adam", None, 0)
    assert found.step == config.StepConfig()
    assert found.output == config.OutputConfig()
    assert found.seed is None


def test_every_flag_arrives(tmp_path):
    found = _parse(
        "--strategy=mirrored",
        "--num_devices=2",
        "--start_timeout=3.5",
        "--hang_timeout=9",
        "--model_config=width=64,dropout=0.5,image_shape=8x8x1,tied=true,pool=mean",
        "--global_batch_size=7",
        "--loop=custom",
        "--steps=9",
        "--steps_per_loop=3",
        "--optimizer=lamb",
        "--learning_rate=0.25",
        "--warmup_steps=5",
        "--precision=mixed_bfloat16",
        "--transport=collective",
        "--accumulate_steps=4",
        "--clip_global_norm=1.5",
        "--jit_compile",
        f"--log_dir={tmp_path}",
        f"--checkpoint_dir={tmp_path}/new",
        "--checkpoint_every=8",
        "--keep_checkpoints=2",
        "--resume=must",
        "--on_save_error=continue",
        "--noasync_save",
        "--seed=11",
        f"--summary_json={tmp_path}/summary.json",
        "--trace_steps=3:7",
        "--profile",
    )
    sizes = {"width": 64, "dropout": 0.5, "image_shape": (8, 8, 1), "tied": True, "pool": "mean"}
    assert found == config.TrainConfig(
        devices=config.DeviceConfig("mirrored", 2, 3.5, 9.0),
        model=config.ModelConfig("mlp", sizes),
        data=config.DataConfig("digits", 7),
        loop=config.LoopConfig("custom", None, 9, 3),
        optimizer=config.OptimizerConfig("lamb", 0.25, 5),
        step=config.StepConfig("mixed_bfloat16", None, "collective", 4, 1.5, True),
        output=config.OutputConfig(
            str(tmp_path), f"{tmp_path}/new", 8, 2, "must", "continue", False, f"{tmp_path}/summary.json", "3:7", True
        ),
        seed=11,
    )
    defaults = absl_flags.FlagValues()
    flags.define(defaults)
    # A flag that is left out above would go untested.
    assert len(defaults) == 32


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--strategy=miror"], "--strategy='miror': choose one of one_device, mirrored, multi_worker, auto"),
        (["--strategy=miror"], "did you mean 'mirrored'?"),
        (["--optimizer=adamm"], "did you mean 'adam"),
        (["--optimizer="], "--optimizer=''"),
        (["--precision=bfloat16"], "did you mean 'mixed_bfloat16'?"),
        (["--loop=costum"], "did you mean 'custom'?"),
        (["--on_save_error=no"], "--on_save_error='no': choose one of stop, continue"),
        (["--hang_timeout=0.5"], "--hang_timeout=0.5: a number of seconds of at least 1 is needed"),
        (["--resume=yes"], "--resume='yes': choose one of auto, never, must"),
        (["--transport=mpi"], "--transport='mpi': this process was not started under MPI"),
        (["--num_devices=0"], "--num_devices=0: an integer of at least 1"),
        (["--strategy=one_device", "--num_devices=2"], "use --strategy=mirrored"),
        (["--start_timeout=0"], "--start_timeout=0.0: a finite number of seconds above 0"),
        (["--start_timeout=inf"], "--start_timeout=inf"),
        (["--global_batch_size=0"], "--global_batch_size=0: an integer of at least 1 is needed"),
        (["--global_batch_size=-5"], "--global_batch_size=-5"),
        (["--epochs=0"], "--epochs=0"),
        (["--steps=0"], "--steps=0"),
        (["--steps_per_loop=0"], "--steps_per_loop=0"),
        (["--epochs=1", "--steps=1"], "--epochs=1 and --steps=1: both say how long to train; leave one out"),
        (["--learning_rate=0"], "--learning_rate=0.0"),
        (["--learning_rate=nan"], "--learning_rate=nan"),
        (["--warmup_steps=-1"], "--warmup_steps=-1: an integer of at least 0"),
        (["--accumulate_steps=0"], "--accumulate_steps=0"),
        (["--clip_global_norm=-1"], "--clip_global_norm=-1.0"),
        (["--checkpoint_every=5"], "--checkpoint_every=5 needs a folder of checkpoints: give --checkpoint_dir=DIR"),
        (["--checkpoint_dir=c", "--checkpoint_every=0"], "--checkpoint_every=0"),
        (["--resume=must"], "--resume=must needs a folder"),
        (["--keep_checkpoints=0"], "--keep_checkpoints=0"),
        (["--seed=-1"], "--seed=-1: an integer from 0 to 4294967295"),
        (["--seed=4294967296"], "--seed=4294967296"),
        ([f"--log_dir={__file__}"], "a folder is needed"),
        ([f"--checkpoint_dir={__file__}"], "a folder is needed"),
        (["--log_dir="], "--log_dir=''"),
        (["--summary_json=/"], "a file is needed"),
        ([f"--summary_json={__file__}/summary.json"], "a folder is needed"),
        ([f"--checkpoint_dir={__file__}/new"], "a folder is needed"),
        (["--log_dir=l", "--trace_steps=10"], "--trace_steps='10': a first step from 1 and the step to end before"),
        (["--log_dir=l", "--trace_steps=0:5"], "--trace_steps=(0, 5): a first step from 1"),
        (["--log_dir=l", "--trace_steps=9:9"], "--trace_steps=(9, 9)"),
        (["--log_dir=l", "--trace_steps=1:20000"], "at most 10,000"),
        (["--trace_steps=1:5"], "--trace_steps=1:5 needs a folder to write to: give --log_dir=DIR"),
        (["--log_dir=l", "--profile"], "--profile needs a range of steps: give --trace_steps=FIRST:END"),
        (["--model_config=width"], "'width' is no name=value; write width=64,depth=2"),
        (["--model_config=width=1,width=2"], "width is given twice"),
        (["--model_config=width=1,"], "'' is no name=value"),
        (["--model="], "--model is missing"),
        (["--data="], "--data is missing"),
    ],
)
def test_wrong_use_names_flag_value_and_what_is_allowed(args, said):
    with pytest.raises(UsageError) as error:
        _parse(*args)
    assert said in str(error.value)


def test_model_and_data_are_needed():
    with pytest.raises(UsageError, match="--model is missing"):
        _parse(needed=("--data=digits",))
    with pytest.raises(UsageError, match="--data is missing"):
        _parse(needed=("--model=mlp",))


def test_unknown_hook(cpu_devices):
    with pytest.raises(UsageError, match="--hook='alreduce'.*allreduce"):
        _parse("--hook=alreduce")
    assert _parse("--hook=allreduce:bucket_mb=4").step.hook == "allreduce:bucket_mb=4"


def test_choices_are_those_of_the_rooms_below(cpu_devices):
    """They are written down twice, so that flags are checked without TensorFlow."""
    from tfdist import strategy
    from tfdist.training import checkpoint

    assert strategy.STRATEGIES == config.STRATEGIES
    assert checkpoint.RESUME == config.RESUMES


_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
_VALUES = st.one_of(
    st.integers(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.lists(st.integers(0, 999), min_size=2, max_size=4).map(tuple),
    st.sampled_from(["mean", "learned", "a-b"]),
)


@given(st.dictionaries(_NAMES, _VALUES))
def test_sizes_round_trip(sizes):
    def write(value: object) -> str:
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

    found = config.parse_sizes(",".join(f"{name}={write(value)}" for name, value in sizes.items()))
    assert found == sizes
    assert [type(value) for value in found.values()] == [type(value) for value in sizes.values()]


@given(st.text())
def test_sizes_are_parsed_or_refused(text):
    try:
        found = config.parse_sizes(text)
    except UsageError as error:
        assert str(error).startswith("--model_config=")
    else:
        assert all(name.isidentifier() for name in found)


@given(st.sampled_from(["global_batch_size", "steps", "accumulate_steps", "steps_per_loop"]), st.integers())
def test_counts_are_kept_or_refused(name, value):
    if -(2**63) <= value < 1:
        with pytest.raises(UsageError, match=f"--{name}={value}"):
            _parse(f"--{name}={value}")
    else:
        found = _parse(f"--{name}={value}") if value > 0 else None
        assert found is None or value in [
            getattr(part, name, None) for part in vars(found).values() if dataclasses.is_dataclass(part)
        ]


_SCRIPT = """
import sys
from tfdist import flags
from tfdist.errors import PeerError, UsageError
from absl import flags as absl_flags
flags.define()
def main():
    config = flags.parse(absl_flags.FLAGS)
    assert "tensorflow" not in sys.modules, "flags alone must not import TensorFlow"
    if config.seed == 1:
        raise UsageError("--seed=1: not this one")
    if config.seed == 2:
        raise PeerError("worker 1 did not come up")
    if config.seed == 3:
        raise RuntimeError("broken")
    print("done")
    return None
flags.run_main(main)
"""


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 0, ""),
        (["--seed=1"], 2, "error: --seed=1: not this one\n"),
        (["--seed=2"], 1, "error: worker 1 did not come up\n"),
        (["--seed=3"], 1, "RuntimeError: broken"),
        (["--seeed=3"], 2, "error: Unknown command line flag 'seeed'. Did you mean: seed ?"),
        (["--steps=two"], 2, "error: flag --steps=two: invalid literal for int()"),
        (["--jit_compile=maybe"], 2, "error: flag --jit_compile=maybe"),
        (["--seed"], 2, "error: Missing value for flag"),
        (["extra"], 2, "error: argument 'extra': only flags are taken, written --name=value"),
        (["--global_batch_size=0"], 2, "error: --global_batch_size=0"),
        (["--help"], 0, ""),
    ],
)
def test_exit_codes(args, code, said, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, script, *_NEEDED, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert ("Traceback" in done.stderr) == (args == ["--seed=3"])
    if args == ["--help"]:
        assert "--global_batch_size" in done.stdout and "--[no]jit_compile" in done.stdout
    elif code == 2:
        assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
