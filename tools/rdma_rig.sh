#!/usr/bin/env bash
# rdma_rig.sh [--check] [--rw DIR]... COMMAND...: runs COMMAND under a Linux kernel that has soft-RoCE.
#
# For machines without RDMA adapters. The guest is User Mode Linux, built once from Debian's kernel
# source, about 8 CPU-minutes and 2 GB of disk meanwhile; from then on it starts in a second. It sees
# this machine's files, read-only below an overlay that is thrown away, has one CPU, no network but
# its own, and runs programs at native speed; page faults and system calls are slower. COMMAND runs as
# root in the current folder with the current environment. What it writes below a --rw DIR stays.
#
#   --check   say why it cannot run here, with status 125, or nothing; builds nothing
#
# From the environment: KVXFER_RIG_CACHE, where the kernel is kept (~/.cache/kvxfer/rig);
# KVXFER_RIG_TIMEOUT, seconds for COMMAND (900).
# Status: COMMAND's own; 124 timed out; 125 the guest cannot be had, with the reason.
set -euo pipefail

die() {
  echo "rdma_rig.sh: $*" >&2
  exit 125
}

check_only= writable=()
while (($#)); do
  case $1 in
    --check) check_only=yes; shift ;;
    --rw) [[ -d ${2:-} ]] || die "--rw '${2:-}': no such folder"; writable+=("$(realpath "$2")"); shift 2 ;;
    *) break ;;
  esac
done

cache=${KVXFER_RIG_CACHE:-$HOME/.cache/kvxfer/rig}
version=1  # of the kernel's configuration below
have_kernel() { [[ $(cat "$cache/version" 2>/dev/null) == "$version" ]]; }

((EUID == 0)) || die "needs root: the guest's processes read this machine's files as this user"
[[ $(uname -m) == x86_64 ]] || die "needs x86-64, this is $(uname -m)"
have_kernel || command -v apt-get >/dev/null || die "no kernel in $cache, and no apt-get to get its source with"
[[ -e /usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so || -n $(command -v apt-get) ]] ||
  die "needs libibverbs1 and ibverbs-providers"
[[ -z $check_only ]] || exit 0
(($#)) || die "no command given"

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9  # one set-up at a time

apt() { DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq "$@" >"$cache/apt.log" 2>&1 </dev/null; }
install() {
  apt install -y --no-install-recommends "$@" ||
    { apt update && apt install -y --no-install-recommends "$@"; } ||
    die "cannot install $*: $(tail -n 3 "$cache/apt.log")"
}
missing=()
for need in rdma:iproute2 perl:perl tc:iproute2; do command -v "${need%:*}" >/dev/null || missing+=("${need#*:}"); done
compgen -G '/usr/lib/*/libibverbs/librxe-*.so' >/dev/null || missing+=(libibverbs1 ibverbs-providers)
((${#missing[@]} == 0)) || install "${missing[@]}"

build_kernel() {
  local tmp=$cache/build source need=()
  rm -rf "$tmp" && mkdir -p "$tmp"
  for tool in gcc make flex bison bc xz:xz-utils; do
    command -v "${tool%:*}" >/dev/null || need+=("${tool#*:}")
  done
  [[ -e /usr/include/elf.h ]] || need+=(libc6-dev)
  ((${#need[@]} == 0)) || install "${need[@]}"
  apt update || true
  (cd "$tmp" && apt download linux-source-6.12) ||
    die "cannot download linux-source-6.12: $(tail -n 3 "$cache/apt.log")"
  echo "rdma_rig.sh: building a kernel in $cache, once; this takes minutes" >&2
  dpkg-deb -x "$tmp"/*.deb "$tmp" && tar -C "$tmp" -xf "$tmp"/usr/src/linux-source-*.tar.xz
  source=$(echo "$tmp"/linux-source-*/)
  # UML keeps 2696 bytes of floating-point state; a CPU with AMX has 11008, and no process starts.
  sed -i 's/HOST_FP_SIZE, 2696/HOST_FP_SIZE, 11264/' "$source/arch/x86/um/user-offsets.c"
  # Processes that poll take turns on the one CPU at ticks: 1000 of them a second.
  sed -i '/^config HZ$/,/default/s/default 100$/default 1000/' "$source/arch/um/Kconfig"
  # INFINIBAND wants PCI and DMA, which come with UML_PCI_OVER_VIRTIO though there is no device.
  printf 'CONFIG_%s=y\n' 64BIT EXPERT PRINTK BUG MULTIUSER BINFMT_ELF BINFMT_SCRIPT TTY UNIX98_PTYS SSL \
    NULL_CHAN STDERR_CONSOLE PROC_FS PROC_SYSCTL SYSCTL SYSFS DEVTMPFS TMPFS TMPFS_XATTR SHMEM MEMFD_CREATE \
    HOSTFS OVERLAY_FS FUTEX EPOLL SIGNALFD TIMERFD EVENTFD AIO ADVISE_SYSCALLS MEMBARRIER POSIX_TIMERS \
    HIGH_RES_TIMERS NO_HZ_IDLE FILE_LOCKING INOTIFY_USER CROSS_MEMORY_ATTACH SYSVIPC POSIX_MQUEUE CGROUPS \
    NAMESPACES UTS_NS IPC_NS PID_NS NET_NS USER_NS HW_RANDOM UML_RANDOM NET INET IPV6 UNIX PACKET \
    IP_ADVANCED_ROUTER IP_MULTIPLE_TABLES NETDEVICES NET_CORE VETH DUMMY NET_SCHED NET_SCH_NETEM VIRTIO_UML \
    UML_PCI_OVER_VIRTIO PCI INFINIBAND INFINIBAND_USER_ACCESS INFINIBAND_USER_MAD INFINIBAND_ADDR_TRANS \
    RDMA_RXE CC_OPTIMIZE_FOR_PERFORMANCE DEBUG_INFO_NONE >"$tmp/config"
  echo CONFIG_KERNEL_STACK_ORDER=4 >>"$tmp/config"
  (cd "$source" && KCONFIG_ALLCONFIG=$tmp/config make ARCH=um allnoconfig &&
    make ARCH=um -j"$(nproc)" linux) >"$cache/build.log" 2>&1 </dev/null ||
    die "the kernel did not build: $(tail -n 5 "$cache/build.log")"
  grep -q '^CONFIG_RDMA_RXE=y' "$source/.config" || die "this kernel source has no rdma_rxe for UML"
  strip -o "$cache/linux" "$source/linux"
  rm -rf "$tmp"
  echo "$version" >"$cache/version"
}
have_kernel || build_kernel
exec 9>&-

run=$(mktemp -d /tmp/kvxfer-rig.XXXXXX)
guest= copiers=()
clean_up() {
  [[ -z $guest ]] || kill "$guest" 2>/dev/null || true
  ((${#copiers[@]} == 0)) || kill "${copiers[@]}" 2>/dev/null || true
  rm -rf "$run"
}
trap clean_up EXIT
trap 'exit 143' INT TERM HUP
export -p >"$run/environment"
printf '%q ' "$@" >"$run/command"
printf '%s\n' "$run" "${writable[@]}" >"$run/writable"
printf '#!/bin/bash\nfolder=%q run=%q\n' "$PWD" "$run" >"$run/init"
chmod +x "$run/init"
cat >>"$run/init" <<'INIT'
# Process 1 of the guest. Its root is the machine's: lay an overlay over it and go in there.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
power_off() { perl -e 'syscall(169, 0xfee1dead, 672274793, 0x4321fedc, 0)'; }
mount -t tmpfs over /mnt && mkdir /mnt/{up,work,new} &&
  mount -t overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work over /mnt/new &&
  cd /mnt/new || power_off
mkdir -p proc sys dev run
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mount -t tmpfs run run
mkdir -p dev/pts dev/shm
mount -t devpts pts dev/pts
mount -t tmpfs shm dev/shm
ln -s /proc/self/fd dev/fd
for i in 0:in 1:out 2:err; do ln -s "/proc/self/fd/${i%:*}" "dev/std${i#*:}"; done
while read -r folder_rw; do
  mkdir -p "./$folder_rw"
  mount -t hostfs -o "$folder_rw" none "./$folder_rw" || mount -t hostfs -o "hostfs=$folder_rw" none "./$folder_rw"
done <"$run/writable"
pivot_root . mnt && cd / || power_off
echo kvxfer-rig >/proc/sys/kernel/hostname
ulimit -l unlimited
ip link set lo up
mkfifo /run/out /run/err
keep=
for pipe in 0:out 1:err; do
  stty -F "/dev/ttyS${pipe%:*}" raw -echo
  cat "/run/${pipe#*:}" >"/dev/ttyS${pipe%:*}" &
  keep+=" $!"
done
exec >/run/out 2>/run/err
(. "$run/environment"; cd "$folder" && eval "exec $(<"$run/command")") </dev/null
status=$?
exec >/dev/null 2>&1  # what the command left running may hold the output open
for process in /proc/[1-9]*; do
  case " 1$keep " in *" ${process#/proc/} "*) ;; *) kill -9 "${process#/proc/}" ;; esac
done
wait
echo $status >"$run/status"
sync
power_off
INIT

# UML makes its descriptors non-blocking: pipes keep it away from those of our caller.
mkfifo "$run/out" "$run/err"
cat "$run/out" & copiers+=($!)
cat "$run/err" >&2 & copiers+=($!)
memory=4096
room=$(df --output=avail -m /dev/shm 2>/dev/null | tail -n 1)
TMPDIR=$([[ ${room:-0} -gt $memory ]] && echo /dev/shm || echo /tmp) \
  timeout -k 5 "${KVXFER_RIG_TIMEOUT:-900}" "$cache/linux" "mem=${memory}M" \
  root=/dev/root rootfstype=hostfs rootflags=/ ro "init=$run/init" quiet \
  con=null ssl=null con0=null,fd:7 ssl0=null,fd:5 ssl1=null,fd:6 \
  </dev/null 5>"$run/out" 6>"$run/err" 7>"$run/console" >"$run/log" 2>&1 &
guest=$!
ended=0
wait "$guest" || ended=$?
guest=
wait "${copiers[@]}" || true
copiers=()
[[ ! -s $run/status ]] || exit "$(<"$run/status")"
((ended != 124 && ended != 137)) || { echo "rdma_rig.sh: timed out" >&2; exit 124; }
die "the guest died: $(tail -n 25 "$run/log" "$run/console")"
