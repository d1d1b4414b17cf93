#!/usr/bin/env bash
# install.sh <pip>: installs the rivals, one by one: what can't be had leaves the others in.
# --no-deps, for the rest of what they ask for serves GPUs.
set -uo pipefail
pip=$1
failed=0
for rival in "nixl nixl-cu12" "mooncake-transfer-engine-non-cuda" "libucx-cu12==1.22.0 libucxx-cu12==0.52.0 ucxx-cu12==0.52.0"; do
  read -ra packages <<<"$rival"
  if ! "$pip" install --quiet --disable-pip-version-check --no-deps "${packages[@]}"; then
    echo "could not install ${packages[*]}; the benchmark will say so" >&2
    failed=$((failed + 1))
  fi
done
((failed < 3))
