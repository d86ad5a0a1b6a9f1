"""Times the aggregation of gradients: every hook and transport, stock TensorFlow, PyTorch's DDP, no communication.

python scripts/bench_aggregation.py
python scripts/bench_aggregation.py --links=200mbit --models=transformer --hooks="allreduce;bf16" --rounds=5

PyTorch takes part where it is installed (`pip install 'tfdist[bench]'`).
"""

import importlib.util
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that has scripts/bench/

import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402

from scripts.bench.links import LINKS, Link, can_be_made, link  # noqa: E402
from scripts.bench.pair import run_alone, run_pair  # noqa: E402
from tfdist.cluster.mpi import is_installed  # noqa: E402
from tfdist.command import write_json  # noqa: E402

CEILING, STOCK, ALONE = "noop@collective", "stock", "allreduce@collective"
BARRIER = "barrier"  # no communication but that of one number, for which workers wait for each other
HOOKS = "allreduce;bf16;fp16;int8;topk:ratio=0.01;powersgd:rank=4;local_sgd:period=8"
TORCH_WAYS = ("ddp", "ddp:fp16", "ddp:powersgd")
TENSORS = "tensors"  # gradients of 100 MB without a model
MODELS = ("transformer", "resnet18", TENSORS)
RUNS = Path(__file__).resolve().parent / "bench"

_LINKS = ["loopback", "1gbit", "200mbit"]
flags.DEFINE_list("links", _LINKS, f"out of {', '.join(LINKS)}; all but loopback need root and iproute2")
flags.DEFINE_list("models", list(MODELS), f"out of {', '.join(MODELS)}")
flags.DEFINE_string("hooks", HOOKS, "specs of hooks, with semicolons between them; bf16@mpi over that transport only")
flags.DEFINE_list("transports", None, "collective, mpi or both; default: all that are installed")
flags.DEFINE_boolean("torch", None, "measure PyTorch's DDP as well; default: where it is installed")
flags.DEFINE_integer("rounds", 5, "how often each way runs", lower_bound=1)
flags.DEFINE_integer("steps", 8, "steps of one run (a multiple of the period of local_sgd)", lower_bound=1)
flags.DEFINE_string("json", None, "write what was measured to this file as well")
flags.DEFINE_float("timeout", 1800.0, "seconds that one model on one link may take", lower_bound=1)


def main(_: list[str]) -> int:
    """Runs each model on each link and prints a table in Markdown."""
    options = flags.FLAGS
    transports = options.transports or (["collective", "mpi"] if is_installed() else ["collective"])
    torch_is_there = importlib.util.find_spec("torch") is not None
    for flag, chosen, known in (
        ("links", options.links, LINKS),
        ("models", options.models, MODELS),
        ("transports", transports, ("collective", "mpi")),
    ):
        for name in chosen:
            if name not in known:
                return wrong(f"--{flag}={name}: choose out of {', '.join(known)}")
    if "mpi" in transports and not is_installed():
        return wrong("--transports=mpi: mpi4py is not installed; pip install 'tfdist[mpi]'")
    if options.torch and not torch_is_there:
        return wrong("--torch: PyTorch is not installed; pip install 'tfdist[bench]'")
    links = list(options.links)
    if not can_be_made() and set(links) != {"loopback"}:
        print("links other than loopback need root and iproute2; measuring loopback only", file=sys.stderr)
        links = ["loopback"]
    hooks = list(filter(None, options.hooks.split(";")))
    ways = [CEILING, f"{BARRIER}@{transports[-1]}", STOCK]
    ways += [way for way in hooks if "@" in way]
    ways += [f"{hook}@{transport}" for transport in transports for hook in hooks if "@" not in hook]
    torch_ways = list(TORCH_WAYS) if torch_is_there and options.torch is not False else []
    rows = []
    for model in options.models:
        has_model = model != TENSORS
        alone = torch_alone = None
        if has_model:
            alone = run_alone(RUNS / "aggregation_run.py", arguments(model, [ALONE], options), options.timeout)
        if has_model and torch_ways:
            torch_alone = run_alone(RUNS / "torch_run.py", arguments(model, ["ddp"], options), options.timeout)
        for name in links:
            print(f"bench_aggregation: {model} over {name} ...", file=sys.stderr, flush=True)
            with link(name) as made:
                found = measured("aggregation_run.py", model, ways, made, options)
                rows += compared(name, model, ways, found, alone and alone["ms"][ALONE])
                if torch_alone:
                    found["ms"] |= measured("torch_run.py", model, torch_ways, made, options)["ms"]
                    rows += compared(name, model, torch_ways, found, torch_alone["ms"]["ddp"])
    print(table(rows))
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})
    return 0


def wrong(message: str) -> int:
    """Tells of wrong use; returns the exit code."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def arguments(model: str, ways: list[str], options: flags.FlagValues) -> list[str]:
    """Returns what the scripts of the workers are given."""
    return [model, ";".join(ways), str(options.rounds), str(options.steps)]


def measured(script: str, model: str, ways: list[str], made: Link, options: flags.FlagValues) -> dict:
    """Returns what two workers on the link have measured."""
    mpi = any(way.endswith("@mpi") for way in ways)
    return run_pair(RUNS / script, arguments(model, ways, options), made, options.timeout, mpi=mpi)


def compared(name: str, model: str, ways: list[str], found: dict, alone: "list[float] | None") -> list[dict]:
    """Returns a row for each way: its median, and the medians of its ratios within each round."""
    times = {way: np.asarray(found["ms"][way]) for way in found["ms"]}
    return [
        {
            "link": name,
            "model": model,
            "hook": way.partition("@")[0],
            "transport": "" if way in (CEILING, STOCK) else way.partition("@")[2] or "gloo",
            "ms": float(np.median(times[way])),
            "to_ceiling": float(np.median(times[way] / times[CEILING])),
            "to_stock": float(np.median(times[way] / times[STOCK])),
            "efficiency": float(np.median(alone) / np.median(times[way])) if alone else None,
            "bytes": found["bytes"].get(way),
        }
        for way in ways
    ]


def table(rows: list[dict]) -> str:
    """Returns the rows in Markdown."""
    titles = ("model", "link", "hook", "transport", "ms a step", "to no communication", "to stock", "efficiency")
    lines = [
        f"Two workers, one core each, on {machine()}; medians.",
        "",
        "| " + " | ".join((*titles, "MB sent a step")) + " |",
        "|" + "---|" * (len(titles) + 1),
    ]
    for row in rows:
        cells = [row["model"], row["link"], row["hook"], row["transport"], f"{row['ms']:.0f}"]
        cells += [f"{row['to_ceiling']:.2f}", f"{row['to_stock']:.2f}"]
        cells.append("" if row["efficiency"] is None else f"{row['efficiency']:.2f}")
        cells.append("" if row["bytes"] is None else f"{row['bytes'] / 1e6:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> str:
    """Returns what this machine is."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}"


if __name__ == "__main__":
    app.run(main)
