"""Times a step: fit against stock Keras, TrainLoop against a hand-written loop, with telemetry against without.

python scripts/bench_step.py
python scripts/bench_step.py --groups=mirrored --only=fit_mlp_mirrored --rounds=9
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

from tfdist.command import write_json

GROUPS = ("one_device", "mirrored", "multi_worker", "telemetry", "save", "endurance")
FOLDER = Path(__file__).resolve().parent

flags.DEFINE_list("groups", list(GROUPS), f"what to time, out of {', '.join(GROUPS)}; each in processes of its own")
flags.DEFINE_list("only", [], "names of rows; the others of the groups are left out")
flags.DEFINE_integer("rounds", 7, "how often each side runs", lower_bound=1)
flags.DEFINE_integer("steps", 100, "steps of one run (transformers: a tenth)", lower_bound=1)
flags.DEFINE_bool("quick", False, "2 rounds of 10 steps: does everything run?")
flags.DEFINE_bool("strict", False, "exit with 1 when a target is missed")
flags.DEFINE_string("json", None, "write what was measured to this file as well")
flags.DEFINE_float("timeout", 1800.0, "seconds that a group may take", lower_bound=1)


def main(_: list[str]) -> int:
    """Runs the groups one after the other and prints the table."""
    options = flags.FLAGS
    for group in options.groups:
        if group not in GROUPS:
            print(f"error: --groups={group}: choose out of {', '.join(GROUPS)}", file=sys.stderr)
            return 2
    rounds, steps = (2, 10) if options.quick else (options.rounds, options.steps)
    rows = []
    for group in options.groups:
        print(f"bench_step: {group} ...", file=sys.stderr, flush=True)
        rows += measured(group, rounds, steps, options.only, options.timeout)
    print(table(rows))
    if options.json:
        write_json(options.json, rows)
    return int(options.strict and any(verdict(row) == "missed" for row in rows))


def measured(group: str, rounds: int, steps: int, names: list[str], timeout: float) -> list[dict]:
    """Runs one group in processes of its own; returns its rows."""
    launcher = ["-m", "tfdist.cli", "launch", "--workers=2"] if group == "multi_worker" else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        script = [str(FOLDER / "bench" / "run.py"), group, str(rounds), str(steps), ",".join(names), str(out)]
        environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
        environment.pop("TF_CONFIG", None)
        subprocess.run(
            [sys.executable, *launcher, *script], check=True, timeout=timeout, env=environment, stdout=sys.stderr
        )
        return json.loads(out.read_text())


def verdict(row: dict) -> str:
    """Returns "met", "missed" or, where there is no target, ""."""
    if row["name"] == "endurance":
        return "met" if row["traces_after_first_epoch"] == 0 and row["memory_growth"] <= 0.05 else "missed"
    if row["target"] is None:
        return ""
    return "met" if row["ratio"] <= row["target"] else "missed"


def table(rows: list[dict]) -> str:
    """Returns the rows as text; times are medians in ms a step, the ratio is the median of the rounds' ratios."""
    lines = [f"{'name':<36} {'other':>8} {'tfdist':>8} {'ratio':>6}  {'quartiles':<11} {'target':>6}"]
    for row in rows:
        if row["name"] == "endurance":
            early, late = row["memory_mb"]
            lines.append(
                f"{row['name']:<36} {row['steps']} steps: {row['traces_after_first_epoch']} traces after the first "
                f"epoch, memory {early:.0f} MB after a quarter, {late:.0f} MB at the end  {verdict(row)}"
            )
            continue
        other = "fails" if row["other_ms"] is None else f"{row['other_ms']:.2f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        spread = "" if row["ratio"] is None else "{:.2f}..{:.2f}".format(*row["quartiles"])
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        lines.append(
            f"{row['name']:<36} {other:>8} {row['ours_ms']:>8.2f} {ratio:>6}  {spread:<11} {target:>6}  {verdict(row)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main)
