#!/usr/bin/env bash
# Builds the GPU kernels with nvcc on a machine with an NVIDIA GPU, checks each against the host's
# bytes on random data, and times them against a copy within the device. Needs nvcc and g++, no
# network. A step that fails does not keep the next from running; the exit status is 1 if one did.
#
#   benches/gpu/run.sh [check] [sweep] [time]      all three by default
#
# Results go to $OUT, or build/gpu-bench. Settings: KVXFER_BENCH_THREADS (a workgroup), _UNROLL (accesses
# under way in a thread), _UNITS (of 16 bytes, for a workgroup), _PANELS (for a workgroup), _ARCH.
set -uo pipefail
cd "$(dirname "$0")/../.."

steps=${*:-check sweep time}
out=${OUT:-build/gpu-bench}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
jobs=$(nproc)
arch=${KVXFER_BENCH_ARCH:-sm_90}
threads=${KVXFER_BENCH_THREADS:-256}
unroll=${KVXFER_BENCH_UNROLL:-4}
mkdir "$work/host"
export KVXFER_BENCH_JSON=$PWD/$out/results.jsonl
[[ $out = /* ]] && export KVXFER_BENCH_JSON=$out/results.jsonl
: >"$KVXFER_BENCH_JSON"

say() { printf '\n== %s (%ss)\n' "$*" "$SECONDS"; }
fail() {
  printf 'FAILED: %s\n' "$*"
  touch "$work/failed"
}

say "machine"
for tool in nvcc g++; do
  command -v "$tool" >/dev/null || { echo "missing: $tool is not on the PATH"; exit 1; }
done
nvcc --version | tail -2 | head -1
g++ --version | head -1
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader ||
  echo "missing: nvidia-smi does not answer"
date -u +%Y-%m-%d

include=(-Icsrc/include -Icsrc -Itests -Ibenches/gpu)
device=(-std=c++20 -O3 -fmad=false "-arch=$arch" "${include[@]}")
host_sources=(csrc/base/digest*.cc csrc/base/cpu_features.cc csrc/base/status.cc csrc/base/element.cc
  csrc/layout/*.cc csrc/codec/*.cc csrc/pack/*.cc)

say "build"
compile_host() {
  g++ -std=c++20 -O2 -ffp-contract=off -Icsrc/include -Icsrc -c "$1" -o "$2/$(tr / _ <<<"$1").o" \
    2>"$2/$(tr / _ <<<"$1").log" || {
    echo "FAILED: $1"
    tail -20 "$2/$(tr / _ <<<"$1").log"
  }
}
export -f compile_host
printf '%s\n' "${host_sources[@]}" |
  xargs -P "$jobs" -I{} bash -c 'compile_host "$1" "$2"' _ {} "$work/host" &
host_build=$!

# One program a variant: name, source, threads, unroll.
variants=("raw raw_bench $threads $unroll")
[[ -f benches/gpu/panel_bench.cu ]] && variants+=("panel panel_bench $threads $unroll")
if [[ $steps = *sweep* ]]; then
  for t in 128 256 512; do
    for u in 2 4 8; do variants+=("raw-$t-$u raw_bench $t $u"); done
    [[ -f benches/gpu/panel_bench.cu ]] && variants+=("panel-$t panel_bench $t $unroll")
  done
fi
compile_variant() {
  read -r name source t u <<<"$1"
  shift
  nvcc "$@" "-DKVXFER_GPU_THREADS=$t" "-DKVXFER_GPU_UNROLL=$u" -Xptxas -v \
    -c "benches/gpu/$source.cu" -o "$work/$name.o" >"$work/$name.log" 2>&1 ||
    { echo "FAILED: $name"; grep -m 10 error "$work/$name.log"; }
}
export -f compile_variant
export work
printf '%s\n' "${variants[@]}" |
  xargs -P "$jobs" -I{} bash -c 'compile_variant "$@"' _ {} "${device[@]}"
wait "$host_build"
link_variant() {
  nvcc "$@" "$work/$name.o" "$work/host.a" -o "$work/$name" >"$work/link.log" 2>&1 && return
  fail "link $name"
  grep -m 5 -E "error|undefined" "$work/link.log"
}
ar rcs "$work/host.a" "$work"/host/*.o  # only what is needed is linked
for object in "$work"/*.o; do
  name=$(basename "$object" .o)
  link_variant "-arch=$arch"
done
for name in raw panel; do
  [[ -f $work/$name.log ]] && cp "$work/$name.log" "$out/$name-ptxas.txt"
done

run() {  # name of the program, its argument
  [[ -x $work/$1 ]] || { fail "$1 was not built"; return; }
  timeout 120 "$work/$1" "$2" 2>>"$out/notes.txt" || fail "$1 $2: exit status $?"
}

if [[ $steps = *check* ]]; then
  for name in raw panel; do
    [[ $name = panel && ! -f benches/gpu/panel_bench.cu ]] && continue
    say "check $name"
    run "$name" check
  done
fi

if [[ $steps = *sweep* ]]; then
  {
    say "sweep"
    for variant in "$work"/raw-*-*.o; do
      name=$(basename "$variant" .o)
      for units in 1024 4096 16384; do
        echo "$name units $units"
        KVXFER_BENCH_JSON="" KVXFER_BENCH_UNITS=$units run "$name" sweep | tail -n +3
      done
    done
    for variant in "$work"/panel-*.o; do
      [[ -f $variant ]] || continue
      name=$(basename "$variant" .o)
      for panels in 1 4 16; do
        echo "$name panels $panels"
        KVXFER_BENCH_JSON="" KVXFER_BENCH_PANELS=$panels run "$name" sweep | tail -n +3
      done
    done
  } | tee "$out/sweep.txt"
fi

if [[ $steps = *time* ]]; then
  for name in raw panel; do
    [[ $name = panel && ! -f benches/gpu/panel_bench.cu ]] && continue
    say "time $name: $threads threads, unroll $unroll"
    run "$name" time | tee "$out/$name.md"
  done
fi

say "end"
[[ -f $out/notes.txt ]] && tail -20 "$out/notes.txt"
[[ ! -e $work/failed ]]
