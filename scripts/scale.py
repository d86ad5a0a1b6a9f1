"""`tfdist scale` as a script.

python scripts/scale.py --replicas=1,2 --out=runs/scale -- scripts/train.py --model=digits_cnn --data=digits
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that has tfdist/

from tfdist.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["scale", *sys.argv[1:]]))
