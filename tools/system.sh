#!/usr/bin/env bash
# system.sh [--tests]: checks that the system has what a build needs and installs it where that is
# possible without asking (as root, with apt-get). Leaves KVXFER_PYTHON and CXX in build/system.env.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/common.sh

want_tests=no
[[ "${1:-}" == --tests ]] && want_tests=yes

python_ok() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10; do
    if python_ok "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
}

venv_ok() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

headers_ok() {
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' >/dev/null 2>&1
}

cxx_ok() {
  "$1" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1 <<'PROBE'
#if defined(__clang__) ? __clang_major__ < 15 : __GNUC__ < 12
#error too old
#endif
#include <span>
int main() {}
PROBE
}

find_cxx() {
  local candidate
  for candidate in ${CXX:-} g++ g++-14 g++-13 g++-12 clang++; do
    if cxx_ok "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
}

doctest_ok() { printf '#include <doctest/doctest.h>\n' | "$1" -fsyntax-only -x c++ - >/dev/null 2>&1; }

# Fills `missing` (for people) and `packages` (for apt-get).
look() {
  missing=()
  packages=()
  python=$(find_python)
  cxx=$(find_cxx)
  if [[ -z "$python" ]]; then
    missing+=("Python 3.10 or newer")
    packages+=(python3 python3-venv python3-dev)
  else
    # Distributions name the packages of a second interpreter after its version.
    local stem=python3
    [[ "$(basename "$python")" == python3.* ]] && stem=$(basename "$python")
    if ! venv_ok "$python"; then
      missing+=("the venv module of $python")
      packages+=("$stem-venv")
    fi
    if ! headers_ok "$python"; then
      missing+=("the C headers of $python")
      packages+=("$stem-dev")
    fi
  fi
  if [[ -z "$cxx" ]]; then
    missing+=("g++ 12 or newer (or CXX set to a compiler that does C++20)")
    packages+=(g++-12)
  elif [[ $want_tests == yes ]] && ! doctest_ok "$cxx"; then
    missing+=("the header doctest/doctest.h, for the C++ tests")
    packages+=(doctest-dev)
  fi
  # Without a compiler nothing tells whether its headers are there.
  if [[ -z "$cxx" && $want_tests == yes ]]; then packages+=(doctest-dev); fi
}

apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

install_packages() {
  say "installing from the system's packages: $*"
  mkdir -p build
  if ! apt_install "$@" >build/apt.log 2>&1; then
    apt-get update >>build/apt.log 2>&1 && apt_install "$@" >>build/apt.log 2>&1
  fi
}

look
if ((${#missing[@]})) && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  install_packages "${packages[@]}" || tail -n 15 build/apt.log >&2
  look
fi
if ((${#missing[@]})); then
  printf 'error: this machine lacks\n' >&2
  printf '  - %s\n' "${missing[@]}" >&2
  printf 'On Debian and Ubuntu this installs it:\n  sudo apt-get install %s\n' "${packages[*]}" >&2
  exit 1
fi

mkdir -p build
printf 'KVXFER_PYTHON=%q\nexport CXX=%q\n' "$python" "$cxx" >build/system.env
