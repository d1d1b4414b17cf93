#!/usr/bin/env bash
# arm64.sh: compiles the core for arm64 and runs those of its C++ tests that depend on the processor
# (digest, codecs, packing, layouts) under qemu, with the SIMD variant that an arm64 machine takes.
# Arguments go to the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh
source build/system.env

target=aarch64-linux-gnu
compiler=${KVXFER_ARM64_CXX:-$target-g++}
dir=build/arm64
export PATH=$PWD/.venv/bin:$PATH
missing=()
command -v "$compiler" >/dev/null || missing+=("g++-$target")
command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
if ((${#missing[@]})); then
  die "make test-arm64 needs more than is here. Debian, Ubuntu: apt-get install ${missing[*]}"
fi

# The header alone: beside it lie those of this machine's C library.
doctest=$(printf '#include <doctest/doctest.h>\n' | "$CXX" -M -x c++ - |
  grep -o '/[^ ]*/doctest/doctest.h')
mkdir -p "$dir/include"
ln -sfn "${doctest%/*}" "$dir/include/doctest"

say "building $dir"
run_logged "$dir/configure.log" cmake -S . -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 "-DCMAKE_CXX_COMPILER=$compiler" \
  -DKVXFER_BUILD_MODULE=OFF -DKVXFER_BUILD_TESTS=ON -DKVXFER_WITH_VERBS=OFF \
  "-DKVXFER_WERROR=${KVXFER_WERROR:-OFF}" "-DDOCTEST_INCLUDE_DIR=$PWD/$dir/include"
cmake --build "$dir" --parallel "$(jobs)" --target kvxfer_tests

say "C++ tests under qemu-aarch64"
unset KVXFER_SIMD
export KVXFER_TEST_TIMEOUT=${KVXFER_TEST_TIMEOUT:-600}  # instructions are translated
qemu-aarch64 -L "/usr/$target" "$dir/kvxfer_tests" --no-intro \
  --source-file="$(printf '*/%s_test.cc,' codec codec_variants digest layout pack panel)" "$@"
