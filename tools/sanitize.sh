#!/usr/bin/env bash
# sanitize.sh [--campaign]: the C++ and Python tests under ASan and UBSan, the C++ tests under TSan; with
# --campaign the fault campaign under ASan and UBSan, and nothing else. Further arguments go to pytest, or
# to the campaign.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh
source build/system.env
root=$PWD

"$CXX" --version | grep -qi clang && die "make sanitize knows g++'s sanitizers only: set CXX=g++-12"

# runtime <library>: the compiler's own copy, which has to be loaded before anything else.
runtime() {
  local path
  path=$("$CXX" -print-file-name="$1")
  [[ $path == /* ]] || die "$CXX has no $1. Debian, Ubuntu: apt-get install libasan8 libubsan1 libtsan2"
  echo "$path"
}

# Every process writes its report to a file: pytest's capture or a parent that does not look at its
# child's exit status would hide it.
reports=$root/build/asan/reports
show_reports() {
  local found=("$reports"/*)
  [[ -e ${found[0]} ]] || return 0
  cat "${found[@]}" >&2
  die "${#found[@]} sanitizer report(s), in $reports"
}

campaign=
if [[ ${1:-} == --campaign ]]; then
  campaign=yes
  shift
fi

tools/build.sh asan --tests
rm -rf "$reports"
mkdir -p "$reports"
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:log_path=$reports/ubsan
# UCX's wheel is not built for sanitizers, but runs beside ASan. The Python tests leave it out, unless
# KVXFER_UCX_PATH names one: over UCX they take minutes. TSan has to know all of a process.
export KVXFER_UCX_PATH=${KVXFER_UCX_PATH:-/nonexistent}
ucx=$(compgen -G "$root/.venv/lib/python3*/site-packages/libucx/lib" | head -1) || ucx=$KVXFER_UCX_PATH
asan_options=strict_string_checks=1:detect_stack_use_after_return=1:handle_segv=2:log_path=$reports/asan

# The sanitized extension stands beside links to the package's files.
overlay=$root/build/asan/python
find "$overlay/kvxfer" -type l -delete
for entry in kvxfer/*; do
  case ${entry##*/} in
    _core*.so | __pycache__) ;;
    *) ln -sfn "$root/$entry" "$overlay/$entry" ;;
  esac
done
ln -sfn "$root/integrations" "$overlay/kvxfer/integrations"

# sanitized ARGUMENTS...: Python with them. From inside the overlay, for `python -m` puts the current directory
# before PYTHONPATH. CPython itself leaks at its end, so leaks are looked for in the C++ tests only.
sanitized() (
  cd "$overlay"
  env LD_PRELOAD="$(runtime libasan.so) $(runtime libubsan.so) $(runtime libstdc++.so)" \
    ASAN_OPTIONS="$asan_options:detect_leaks=0" PYTHONPATH="$overlay:$root/tests" HYPOTHESIS_PROFILE=sanitize \
    KVXFER_EXPECT_SANITIZE=address,undefined KVXFER_FAKE_VERBS="$root/build/asan/libkvxfer_fake_verbs.so" \
    "$root/.venv/bin/python" "$@"
)

if [[ -n $campaign ]]; then
  say "the fault campaign under ASan and UBSan"
  asan_options+=:quarantine_size_mb=64  # or a process grows by 256 MB of what it has freed
  status=0
  KVXFER_UCX_PATH=$ucx sanitized -m faults.campaign "$@" || status=$?
  show_reports
  exit $status
fi

say "C++ tests under ASan and UBSan"
KVXFER_UCX_PATH=$ucx ASAN_OPTIONS=$asan_options:detect_leaks=1 build/asan/kvxfer_tests --no-intro ||
  { show_reports; exit 1; }
# Without a log file: ASan warns that it half understands fibers, which is no report.
for wave in 32 64; do
  ASAN_OPTIONS=handle_segv=2:detect_leaks=1 "build/asan/kvxfer_gpu_tests_$wave" --no-intro ||
    { show_reports; exit 1; }
done

tools/build.sh tsan --tests
# Beside the Python tests, which wait for one another's processes for much of their time.
# TSan of g++ 12 can't place its shadow memory where the kernel randomises addresses by 32 bits.
fixed_addresses=()
if setarch -R true 2>/dev/null; then fixed_addresses=(setarch -R); fi
KVXFER_UCX_PATH=/nonexistent TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
  "${fixed_addresses[@]}" build/tsan/kvxfer_tests --no-intro >build/tsan/tests.log 2>&1 &
tsan_tests=$!
trap 'kill $tsan_tests 2>/dev/null || true' EXIT

say "Python tests under ASan and UBSan"
# But for those that run no code of the core's.
no_core=(tests/{gateway,unit/serving,unit/size,unit/test_check_layers.py,faults/test_model.py})
# UBSan next to ASan writes to stderr whatever log_path says, so pytest must leave that descriptor alone.
sanitized -m pytest "$root/tests" -c "$root/pyproject.toml" --rootdir "$root" \
  -p no:cacheprovider --capture=sys -m "not slow" "${no_core[@]/#/--ignore=$root/}" "$@" || { show_reports; exit 1; }
show_reports

say "C++ tests under TSan"
wait $tsan_tests || { cat build/tsan/tests.log >&2; die "the C++ tests failed under TSan"; }
cat build/tsan/tests.log
