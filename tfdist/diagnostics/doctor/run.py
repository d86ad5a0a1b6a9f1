"""One worker of `tfdist doctor --workers=N`: run.py OUT CHECKPOINT_DIR DATA TIMEOUT. The chief writes OUT."""

import os
import sys
from pathlib import Path

from tfdist.cluster.base import Cluster
from tfdist.command import write_json
from tfdist.diagnostics.doctor.command import ended_in_order
from tfdist.diagnostics.doctor.job import examine
from tfdist.diagnostics.doctor.report import Report
from tfdist.diagnostics.doctor.worker import Options


def main(out: Path, options: Options) -> None:
    """Examines the job."""

    def publish(report: Report) -> None:
        if report.author == 0:
            write_json(out, report.to_json())

    with ended_in_order():
        examine(Cluster.detect(), options, publish)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(Path(sys.argv[1]), Options(sys.argv[2], sys.argv[3], float(sys.argv[4])))
