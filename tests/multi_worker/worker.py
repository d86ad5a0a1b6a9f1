"""One worker of a job that runs test bodies; see `harness`. Usage: worker.py FOLDER DEVICES, by `tfdist launch`."""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tfdist  # noqa: E402
from tests.multi_worker import harness  # noqa: E402


def main(folder: Path, devices: int) -> int:
    strategy = tfdist.make_strategy("multi_worker", num_devices=devices)
    cluster = tfdist.Cluster.detect()
    cases = json.loads((folder / "cases.json").read_text())
    for number, name in enumerate(cases):
        shared = folder / f"shared_{number}"
        shared.mkdir(exist_ok=True)
        job = harness.Job(strategy, cluster.num_workers, cluster.index, shared)
        result = {}
        try:
            result["values"] = harness.as_json(harness.run_body(harness.load_body(name), job))
        except BaseException:  # noqa: B036, a body that calls sys.exit must be reported, too
            result["error"] = f"worker {job.index}: {traceback.format_exc()}"
        temporary = folder / f"{number}.{job.index}.new"
        temporary.write_text(json.dumps(result))
        temporary.rename(folder / f"{number}.{job.index}.json")
        if "error" in result:
            return 1  # the other workers may wait for this one: the rest needs another job
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
