#!/usr/bin/env bash
# fuzz.sh [--runs N] [--seconds S] [TARGET...]: builds the fuzz targets with clang, ASan and UBSan, and
# runs each of them from the corpus in tests/data/fuzz. What it finds lies in build/fuzz/findings.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh

runs=1000000
seconds=3600
targets=()
while (($#)); do
  case $1 in
    --runs) runs=$2; shift ;;
    --seconds) seconds=$2; shift ;;
    *) targets+=("$1") ;;
  esac
  shift
done

find_clang() {
  local candidate
  for candidate in ${FUZZ_CXX:-} clang++ /usr/lib/llvm-*/bin/clang++ clang++-{22,20,19,18,17,16,15}; do
    if echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
      "$candidate" -x c++ -fsanitize=fuzzer,address - -o /dev/null >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
}
cxx=$(find_clang)
[[ -n $cxx ]] || die "no clang with libFuzzer was found. Debian, Ubuntu: apt-get install clang; or set FUZZ_CXX"

export PATH=$PWD/.venv/bin:$PATH
dir=build/fuzz
mkdir -p $dir/findings
run_logged $dir/configure.log cmake -S . -B $dir -G Ninja "-DCMAKE_CXX_COMPILER=$cxx" \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVXFER_SANITIZE=address,undefined \
  -DCMAKE_CXX_FLAGS=-fsanitize=fuzzer-no-link -DKVXFER_BUILD_MODULE=OFF -DKVXFER_BUILD_FUZZ=ON \
  -DKVXFER_WITH_HIP=off -DKVXFER_WITH_CUDA=off
say "building $dir"
cmake --build $dir --parallel "$(jobs)" | tail -n 1

((${#targets[@]})) || targets=(messages endpoint chunk engine python)
for target in "${targets[@]}"; do
  say "fuzzing $target, $runs times"
  corpus=$dir/corpus/$target
  mkdir -p "$corpus" "tests/data/fuzz/$target"
  if [[ $target == python ]]; then
    PYTHONPATH=tests .venv/bin/python -m faults.fuzz_python --runs "$runs" --seconds "$seconds"
    continue
  fi
  UBSAN_OPTIONS=print_stacktrace=1 "$dir/kvxfer_fuzz_$target" "$corpus" "tests/data/fuzz/$target" \
    -runs="$runs" -max_total_time="$seconds" -max_len=4096 -rss_limit_mb=2048 -timeout=20 \
    -print_final_stats=1 -verbosity=0 "-artifact_prefix=$dir/findings/$target-"
done
