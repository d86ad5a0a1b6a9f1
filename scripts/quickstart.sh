#!/usr/bin/env bash
# Trains a small CNN on images of digits with two local workers; makes .venv first where it is missing.
#
#   ./scripts/quickstart.sh [FLAGS OF scripts/train.py...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

mkdir -p runs
run="$(mktemp -d "runs/quickstart-$(date +%Y%m%d-%H%M%S)-XXXX")" # a new folder: nothing is overwritten
chmod 755 "$run"
exec .venv/bin/tfdist launch --workers=2 --log_dir="$run/workers" scripts/train.py \
  --strategy=multi_worker --model=digits_cnn --model_config=dropout=0.5 --data=digits \
  --epochs=20 --global_batch_size=64 --optimizer=adam --learning_rate=0.002 --seed=1 \
  --checkpoint_dir="$run/checkpoints" --log_dir="$run/tensorboard" --summary_json="$run/summary.json" "$@"
