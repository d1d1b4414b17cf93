#!/usr/bin/env bash
# test_rdma.sh: the tests of the verbs transport on real ibverbs, over soft-RoCE: two hosts with two
# rails between them, which are cut, lose packets and come back. Where this machine has no rdma_rxe of
# its own to spare, all of it runs in the guest of rdma_rig.sh. Arguments go to pytest. Then some tests
# of the ucx transport, over reliable connections and datagrams; the wheels of UCX have neither.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh

if ! reason=$(tools/rdma_rig.sh --check 2>&1); then
  say "skipped: no soft-RoCE here. ${reason#rdma_rig.sh: }"
  exit 0
fi
if [[ ${CI:-} == true && ! -e ${KVXFER_RIG_CACHE:-$HOME/.cache/kvxfer/rig}/version ]]; then
  say "skipped: the guest's kernel is not in the cache, and takes too long to build here"
  exit 0
fi
unset KVXFER_VERBS_LIBRARY

say "C++ tests over soft-RoCE"
KVXFER_UCX_PATH=/nonexistent tools/rdma_rig.sh tests/verbs/rig.sh run build/release/kvxfer_tests --no-intro -sf="*verbs_test*,*verbs_rig_test*,*transport_test*,*engine_test*"
say "Python tests over soft-RoCE, between two processes"
tools/rdma_rig.sh tests/verbs/rig.sh run .venv/bin/python -m pytest -p no:cacheprovider \
  tests/conformance tests/faults -k verbs "$@"

if [[ -z ${KVXFER_UCX_PATH:-} ]] && ! compgen -G '/usr/lib/*/ucx/libuct_ib.so.0' >/dev/null; then
  say "skipped: no UCX with verbs (Debian, Ubuntu: apt-get install libucx0)"
  exit 0
fi
once=$PWD/build/release/libkvxfer_last_wqe.so
say "C++ tests of UCX over soft-RoCE"
# The test program has a libibverbs of its own, which UCX must not find first.
tools/rdma_rig.sh tests/verbs/rig.sh run env LD_PRELOAD="$once libibverbs.so.1" UCX_LOG_LEVEL=error \
  build/release/kvxfer_tests --no-intro -tc="ucx: *,links say*"
say "Python tests of UCX over soft-RoCE"
tools/rdma_rig.sh tests/verbs/rig.sh run env LD_PRELOAD="$once" UCX_LOG_LEVEL=error \
  .venv/bin/python -m pytest -p no:cacheprovider tests/conformance/test_{geometry,restart,sharing}.py \
  -k "ucx-rc or ucx-ud" "$@"
