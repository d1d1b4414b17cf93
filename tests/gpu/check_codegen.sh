#!/usr/bin/env bash
# Compiles the GPU kernels for every target and reads what came out: 16-byte accesses and the fp8
# conversion where they are meant, no scratch memory, no spilled registers. Prints a table of
# registers. A compiler that is missing is named and skipped; --require makes that a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/local/cuda/bin
shopt -s nullglob
for bin in .venv/lib/python3*/site-packages/nvidia/*/bin; do PATH=$PATH:$PWD/$bin; done

require=0
[[ ${1:-} = --require ]] && require=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
clang=${KVXFER_HIP_CLANG:-clang++-22}
objdump=${KVXFER_HIP_OBJDUMP:-llvm-objdump-22}

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

missing() {
  echo "skipped: $*"
  ((require)) && failures=$((failures + 1))
  return 0
}

# has <what it is for> <kernel> <pattern> <file with its instructions>
has() {
  sed -n "/^$2:/,/^\$/p" "$4" >"$work/body"
  [[ -s $work/body ]] || { fail "$1: no kernel $2"; return; }
  grep -Eq "$3" "$work/body" || fail "$1: $2 has no $3"
}

row() { printf '| %-8s | %-34s | %4s | %4s | %6s | %6s |\n' "$@"; }

amd() {
  local target=$1 kernel
  "$clang" -x hip --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc \
    "--offload-arch=$target" -mcode-object-version=5 -std=c++20 -O3 -ffp-contract=off -Wall -Wextra \
    -Werror -Icsrc/include -Icsrc -Rpass-analysis=kernel-resource-usage \
    csrc/pack/gpu_kernels.hip -o "$work/$target.co" 2>"$work/$target.log" || {
    fail "$target: $(grep -m 3 error "$work/$target.log")"
    return
  }
  awk -v target="$target" '
    /Function Name:/ { name = $5 }
    / VGPRs:/ { vgprs = $4 }
    /TotalSGPRs:/ || / SGPRs:/ { if ($3 == "TotalSGPRs:") sgprs = $4 }
    /ScratchSize/ { scratch = $(NF - 1) }
    /VGPRs Spill:/ { spill = $(NF - 1); print target, name, vgprs, sgprs, scratch, spill }
  ' "$work/$target.log" >"$work/$target.table"
  while read -r t name vgprs sgprs scratch spill; do
    row "$t" "$name" "$vgprs" "$sgprs" "$scratch" "$spill"
    [[ $scratch = 0 && $spill = 0 ]] || fail "$t: $name uses scratch memory"
  done <"$work/$target.table"
  [[ -s $work/$target.table ]] || fail "$target: no kernel was reported"
  "$objdump" -d --no-leading-addr --no-show-raw-insn "$work/$target.co" |
    sed 's/^[0-9a-f]* *<\(.*\)>:/\1:/' >"$work/$target.s"
  for kernel in kvxfer_pack_raw16 kvxfer_unpack_raw16; do
    has "$target" "$kernel" global_load_dwordx4 "$work/$target.s"
    has "$target" "$kernel" global_store_dwordx4 "$work/$target.s"
  done
  has "$target" kvxfer_digest_raw16 global_load_dwordx4 "$work/$target.s"
  has "$target" kvxfer_pack_e4m3_bfloat16_128 global_load_dwordx4 "$work/$target.s"
  has "$target" kvxfer_pack_e4m3_bfloat16_128 v_cvt_pk_fp8_f32 "$work/$target.s"
  has "$target" kvxfer_pack_e5m2_bfloat16_128 v_cvt_pk_bf8_f32 "$work/$target.s"
  has "$target" kvxfer_unpack_e4m3_bfloat16_128 global_store_dwordx4 "$work/$target.s"
}

nvidia() {
  local target=$1 kernel
  nvcc -std=c++20 -O3 -fmad=false "-arch=$target" -Werror all-warnings -Xptxas -v -cubin \
    -Icsrc/include -Icsrc csrc/pack/gpu_kernels.cu -o "$work/$target.cubin" 2>"$work/$target.log" || {
    fail "$target: $(grep -m 3 error "$work/$target.log")"
    return
  }
  awk -v target="$target" '
    /Compiling entry function/ { split($0, part, "\x27"); name = part[2] }
    /bytes stack frame/ { stack = $1; spill = $5 + $9 }
    /Used [0-9]+ registers/ { for (i = 1; i < NF; ++i) if ($i == "Used") print target, name, $(i + 1), "-", stack, spill }
  ' "$work/$target.log" >"$work/$target.table"
  while read -r t name registers sgprs scratch spill; do
    row "$t" "$name" "$registers" "$sgprs" "$scratch" "$spill"
    [[ $scratch = 0 && $spill = 0 ]] || fail "$t: $name has a stack frame or spills"
  done <"$work/$target.table"
  [[ -s $work/$target.table ]] || fail "$target: no kernel was reported"
  command -v nvdisasm >/dev/null || return 0
  # One paragraph a kernel.
  nvdisasm -c "$work/$target.cubin" |
    sed -e '/^$/d' -e 's/^\.text\.\([a-z0-9_]*\):.*/\1:/' -e 's|^//-* .*|\n|' >"$work/$target.s"
  grep -Eq '\b(LDL|STL)\b' "$work/$target.s" && fail "$target: a kernel has local memory"
  for kernel in kvxfer_pack_raw16 kvxfer_unpack_raw16; do
    has "$target" "$kernel" 'LDG\.E\S*\.128' "$work/$target.s"
    has "$target" "$kernel" 'STG\.E\S*\.128' "$work/$target.s"
  done
  has "$target" kvxfer_digest_raw16 'LDG\.E\S*\.128' "$work/$target.s"
  has "$target" kvxfer_pack_e4m3_bfloat16_128 'LDG\.E\S*\.128' "$work/$target.s"
  has "$target" kvxfer_unpack_e4m3_bfloat16_128 'STG\.E\S*\.128' "$work/$target.s"
  [[ $target = sm_80 ]] && return  # has no instruction for it
  has "$target" kvxfer_pack_e4m3_bfloat16_128 'F2FP\.SATFINITE\.E4M3' "$work/$target.s"
  has "$target" kvxfer_pack_e5m2_bfloat16_128 'F2FP\.SATFINITE\.E5M2' "$work/$target.s"
}

row target kernel regs sgpr scratch spills
row --- --- --- --- --- ---
if command -v "$clang" >/dev/null && command -v "$objdump" >/dev/null; then
  amd gfx942
  amd gfx950
else
  missing "$clang or $objdump is not on the PATH (Debian: clang-22, lld-22, llvm-22)"
fi
if command -v nvcc >/dev/null; then
  nvidia sm_80
  nvidia sm_90
  nvidia sm_100
  command -v nvdisasm >/dev/null ||
    missing "nvdisasm is not on the PATH, so NVIDIA's instructions were not read (pip: nvidia-cuda-nvdisasm)"
else
  missing "nvcc is not on the PATH"
fi
((failures == 0))
