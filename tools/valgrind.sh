#!/usr/bin/env bash
# valgrind.sh [ARGUMENTS...]: the C++ tests of the UCX transport under valgrind, which watches what UCX does, too:
# it is not built for sanitizers. Arguments go to the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh

command -v valgrind >/dev/null || die "valgrind was not found. Debian, Ubuntu: apt-get install valgrind"
ucx=${KVXFER_UCX_PATH:-$(echo "$PWD"/.venv/lib/python3*/site-packages/libucx/lib)}
[[ -d $ucx ]] || die "no UCX in $ucx: pip install libucx-cu12 into .venv, or set KVXFER_UCX_PATH"
say "C++ tests of UCX under valgrind"
KVXFER_UCX_PATH=$ucx valgrind --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite,indirect \
  --suppressions=tests/valgrind.supp --quiet build/release/kvxfer_tests --no-intro -tc="ucx*" "$@"
