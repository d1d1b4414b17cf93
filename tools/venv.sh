#!/usr/bin/env bash
# venv.sh <group...>: makes .venv where there is none that works, and installs the requirement groups
# of pyproject.toml ("build", or an extra's name) that it does not have yet.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh
source build/system.env

# A virtual environment knows its own path: one that was moved or whose interpreter is gone is stale.
venv_works() {
  [[ -x .venv/bin/python ]] || return 1
  local prefix
  prefix=$(.venv/bin/python -c 'import sys; print(sys.prefix)' 2>/dev/null) || return 1
  [[ "$prefix" -ef .venv ]] && .venv/bin/python -m pip --version >/dev/null 2>&1 &&
    grep -qF "$PWD/.venv" .venv/bin/pip
}

if ! [[ -f .venv/kvxfer.ready ]] || ! venv_works; then
  say "making .venv with $("$KVXFER_PYTHON" --version)"
  rm -rf .venv
  run_logged build/venv.log "$KVXFER_PYTHON" -m venv .venv
  touch .venv/kvxfer.ready
fi

for group in "$@"; do
  wanted=$(.venv/bin/python tools/requirements.py "$group")
  stamp=.venv/kvxfer.$group
  if [[ -f $stamp && "$(<"$stamp")" == "$wanted" ]]; then continue; fi
  say "installing the $group requirements into .venv"
  mapfile -t requirements <<<"$wanted"
  run_logged "build/pip-$group.log" .venv/bin/python -m pip install --disable-pip-version-check \
    --no-input "${requirements[@]}"
  printf '%s\n' "$wanted" >"$stamp"
done
