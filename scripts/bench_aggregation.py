"""Times the aggregation of gradients: every hook, stock TensorFlow and no communication, over links of several speeds.

python scripts/bench_aggregation.py
python scripts/bench_aggregation.py --links=200mbit --models=transformer --hooks="allreduce;bf16" --rounds=5
"""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that has scripts/bench/

import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402

from scripts.bench.links import LINKS, Link, can_be_made, link  # noqa: E402

CEILING, STOCK = "noop", "stock"
HOOKS = "allreduce;bf16;fp16;int8;topk:ratio=0.01;powersgd:rank=4;local_sgd:period=8"
MODELS = ("transformer", "resnet18")
RUN = Path(__file__).resolve().parent / "bench" / "aggregation_run.py"

flags.DEFINE_list("links", list(LINKS), f"out of {', '.join(LINKS)}; all but loopback need root and iproute2")
flags.DEFINE_list("models", list(MODELS), f"out of {', '.join(MODELS)}")
flags.DEFINE_string("hooks", HOOKS, "specs of hooks, with semicolons between them")
flags.DEFINE_integer("rounds", 5, "how often each way runs", lower_bound=1)
flags.DEFINE_integer("steps", 8, "steps of one run (a multiple of the period of local_sgd)", lower_bound=1)
flags.DEFINE_string("json", None, "write what was measured to this file as well")
flags.DEFINE_float("timeout", 1800.0, "seconds that one model on one link may take", lower_bound=1)


def main(_: list[str]) -> int:
    """Runs each model on each link and prints a table in Markdown."""
    options = flags.FLAGS
    for flag, chosen, known in (("links", options.links, LINKS), ("models", options.models, MODELS)):
        for name in chosen:
            if name not in known:
                print(f"error: --{flag}={name}: choose out of {', '.join(known)}", file=sys.stderr)
                return 2
    links = list(options.links)
    if not can_be_made() and set(links) != {"loopback"}:
        print("links other than loopback need root and iproute2; measuring loopback only", file=sys.stderr)
        links = ["loopback"]
    hooks = [CEILING, STOCK, *filter(None, options.hooks.split(";"))]
    rows = []
    for model in options.models:
        alone = measured(model, ["allreduce"], None, options)["ms"]["allreduce"]
        for name in links:
            print(f"bench_aggregation: {model} over {name} ...", file=sys.stderr, flush=True)
            with link(name) as made:
                rows += compared(name, model, hooks, measured(model, hooks, made, options), alone)
    print(table(rows))
    if options.json:
        target = Path(options.json)
        temporary = target.with_name(target.name + ".new")
        temporary.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        temporary.replace(target)
    return 0


def measured(model: str, hooks: list[str], made: "Link | None", options: flags.FlagValues) -> dict:
    """Runs two workers on the link, or one alone without it; returns what the first one has measured."""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": "1"}
    environment.pop("TF_CONFIG", None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, str(RUN), model, ";".join(hooks), str(options.rounds), str(options.steps), str(out)]
        if made is None:
            subprocess.run(command, check=True, timeout=options.timeout, env=environment, stdout=sys.stderr)
            return json.loads(out.read_text())
        addresses = [f"{host}:{port}" for host, port in zip(made.hosts, free_ports(2), strict=True)]
        workers = []
        try:
            for index, prefix in enumerate(made.prefixes):
                task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                own = {**environment, "TF_CONFIG": json.dumps(task)}
                workers.append(subprocess.Popen([*prefix, *command], env=own, stdout=sys.stderr))
            codes = [worker.wait(options.timeout) for worker in workers]
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
        if any(codes):
            raise RuntimeError(f"{model} over {made.name}: the workers ended with {codes}; see above")
        return json.loads(out.read_text())


def free_ports(count: int) -> list[int]:
    """Returns ports that are free on this machine's loopback; a new namespace has all of them."""
    taken = [socket.socket() for _ in range(count)]
    for one in taken:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


def compared(name: str, model: str, hooks: list[str], found: dict, alone: list[float]) -> list[dict]:
    """Returns a row for each way: its median, and the medians of its ratios within each round."""
    times = {hook: np.asarray(found["ms"][hook]) for hook in hooks}
    return [
        {
            "link": name,
            "model": model,
            "hook": hook,
            "ms": float(np.median(times[hook])),
            "to_ceiling": float(np.median(times[hook] / times[CEILING])),
            "to_stock": float(np.median(times[hook] / times[STOCK])),
            "efficiency": float(np.median(alone) / np.median(times[hook])),
            "bytes": found["bytes"][hook],
        }
        for hook in hooks
    ]


def table(rows: list[dict]) -> str:
    """Returns the rows in Markdown."""
    lines = [
        f"Two workers, one core each, on {machine()}; medians.",
        "",
        "| model | link | hook | ms a step | to no communication | to stock | efficiency | MB sent a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['link']} | {row['hook']} | {row['ms']:.0f} | {row['to_ceiling']:.2f} | "
            f"{row['to_stock']:.2f} | {row['efficiency']:.2f} | {row['bytes'] / 1e6:.2f} |"
        )
    return "\n".join(lines)


def machine() -> str:
    """Returns what this machine is."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}"


if __name__ == "__main__":
    app.run(main)
