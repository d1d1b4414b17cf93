# Sourced by the scripts beside it: messages, and commands whose output only matters when they fail.

say() { printf '==> %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# run_logged <log file> <command...>: quiet on success, shows the end of the log on failure.
run_logged() {
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  if ! "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    die "failed: $* (all of its output: $log)"
  fi
}

# Processors that this process may use.
jobs() { echo "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"; }
