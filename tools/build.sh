#!/usr/bin/env bash
# build.sh <flavour> [--tests]: configures and builds build/<flavour>, doing again only what changed.
#   release  what `make build` gives; the extension is copied into kvxfer/ too
#   asan     address and undefined-behaviour sanitizers
#   tsan     thread sanitizer; C++ tests only
# The extension lands in build/<flavour>/python/kvxfer, the C++ tests in build/<flavour>.
# Uses .venv; the options KVXFER_WITH_{UCX,VERBS,HIP,CUDA} and KVXFER_WERROR come from the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh
source build/system.env

flavour=$1
tests=OFF
[[ "${2:-}" == --tests ]] && tests=ON

build_type=RelWithDebInfo
module=ON
sanitize=
werror=OFF  # g++ sees ghosts in instrumented code
case $flavour in
  release) build_type=Release werror=${KVXFER_WERROR:-OFF} ;;
  asan) sanitize=address,undefined ;;
  tsan) sanitize=thread module=OFF ;;
  *) die "unknown flavour '$flavour': release, asan or tsan" ;;
esac

dir=build/$flavour
export PATH=$PWD/.venv/bin:$PATH
options=(
  -DCMAKE_BUILD_TYPE=$build_type -DKVXFER_SANITIZE=$sanitize
  -DKVXFER_BUILD_MODULE=$module
  "-DPython_EXECUTABLE=$PWD/.venv/bin/python"
  "-Dpybind11_DIR=$(python -m pybind11 --cmakedir)"
  -DKVXFER_WERROR=$werror
)
for name in UCX VERBS HIP CUDA; do
  option=KVXFER_WITH_$name
  default=auto
  # Kernels for GPUs are the same in all trees, take a minute, and no sanitizer sees them.
  [[ $flavour != release && $name =~ ^(HIP|CUDA)$ ]] && default=off
  options+=("-D$option=${!option:-$default}")
done

mkdir -p "$dir"
asked="$CXX ${options[*]}"
# Once a tree has tests it keeps them, so that `make demo` after `make test` configures nothing anew.
if [[ $tests == ON ]] && ! grep -qs '^KVXFER_BUILD_TESTS:BOOL=ON' "$dir/CMakeCache.txt"; then
  options+=(-DKVXFER_BUILD_TESTS=ON)
  rm -f "$dir/asked"
fi
if ! [[ -f $dir/build.ninja && -f $dir/asked && "$(<"$dir/asked")" == "$asked" ]]; then
  say "configuring $dir"
  # CMake can change neither the compiler nor the place of a tree that exists.
  cache=$dir/CMakeCache.txt
  if [[ -f $cache ]] &&
    ! { grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$(pwd -P)" "$cache" &&
      grep -qxF -e "CMAKE_CXX_COMPILER:FILEPATH=$CXX" -e "CMAKE_CXX_COMPILER:STRING=$CXX" "$cache"; }; then
    rm -rf "$cache" "$dir/CMakeFiles"
  fi
  rm -f "$dir/asked"
  run_logged "$dir/configure.log" cmake -S . -B "$dir" -G Ninja "${options[@]}"
  printf '%s\n' "$asked" >"$dir/asked"
fi

say "building $dir"
targets=()
[[ $module == ON ]] && targets+=(_core)
[[ $tests == ON ]] && targets+=(kvxfer_tests)
[[ $tests == ON && $flavour != tsan ]] && targets+=(kvxfer_gpu_tests_32 kvxfer_gpu_tests_64)
compile() {
  NINJA_STATUS='  [%f/%t] ' cmake --build "$dir" --parallel "$(jobs)" --target "${targets[@]}"
}
if [[ -t 1 ]]; then
  compile  # on a terminal ninja shows its progress in one line
else
  compile | { grep --line-buffered -vE 'no work to do|globbed directories' || true; }
fi

if [[ $flavour == release ]]; then
  for built in "$dir"/python/kvxfer/_core*.so; do
    installed=kvxfer/${built##*/}
    # By rename: a running process keeps the file that it has mapped.
    cmp -s "$built" "$installed" || { cp "$built" "$installed.new" && mv "$installed.new" "$installed"; }
  done
fi
