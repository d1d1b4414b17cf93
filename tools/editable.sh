#!/usr/bin/env bash
# editable.sh: installs the package into .venv as editable, over the tree that build.sh made, so that
# nothing is compiled twice. Once is enough: from then on a build is all it takes.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh
source build/system.env

stamp=.venv/kvxfer.editable
now=$(cat pyproject.toml setup.py | cksum)
if [[ -f $stamp && "$(<"$stamp")" == "$now" ]]; then exit 0; fi
say "installing kvxfer into .venv as editable"
export PATH=$PWD/.venv/bin:$PATH KVXFER_BUILD_DIR=$PWD/build/release
run_logged build/pip-editable.log python -m pip install --disable-pip-version-check --no-input \
  --no-build-isolation --no-deps --editable .
printf '%s\n' "$now" >"$stamp"
