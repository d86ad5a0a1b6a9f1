#!/usr/bin/env bash
# Runs the style checks and the tests; makes .venv first where it is missing.
#
#   ./scripts/test.sh [--slow | --long] [PYTEST ARGS...]
#
# --slow runs the slow tests too, --long also those that belong to a release; everything else goes to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

select=(-m "not slow and not long")
args=()
for arg in "$@"; do
  case "$arg" in
    --slow) select=(-m "not long") ;;
    --long) select=() ;;
    *) args+=("$arg") ;;
  esac
done

.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest ${select[@]+"${select[@]}"} ${args[@]+"${args[@]}"}
