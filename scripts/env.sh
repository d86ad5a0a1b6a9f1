# Sourced by the scripts beside it: makes .venv with tfdist and its test tools, and leaves the working
# directory at the repository's root. It installs again only when pyproject.toml or the Python changed.

_fail() {
  echo "error: $*" >&2
  exit 2
}

_fits() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

_find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.10; do
    if _fits "$name"; then
      echo "$name"
      return
    fi
  done
  return 1
}

_ensure_env() {
  local python stamp want
  stamp=.venv/tfdist-installed
  if _fits .venv/bin/python; then
    want="$(.venv/bin/python - pyproject.toml <<'PYTHON'
import hashlib, pathlib, sys

print(hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest(), sys.version.split()[0], pathlib.Path.cwd())
PYTHON
)"
    [[ "$(cat "$stamp" 2>/dev/null)" != "$want" ]] || return 0
  else
    python="$(_find_python)" || _fail "no Python from 3.10 to 3.13 found (tried python3 and python3.13 to" \
      "python3.10 on PATH); install one, for example with your package manager or from https://www.python.org"
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
      _fail "$(command -v "$python") has no venv module; install it (Debian, Ubuntu: apt install python3-venv)"
    echo "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv || _fail "could not make .venv in $PWD"
    _ensure_env
    return
  fi
  rm -f "$stamp"
  echo "installing tfdist and what it needs into .venv (some minutes the first time)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' ||
    _fail "the installation into .venv failed (see above); run this again when the cause is gone"
  echo "$want" >"$stamp.tmp"
  mv "$stamp.tmp" "$stamp"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
_ensure_env
