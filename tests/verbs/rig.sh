#!/usr/bin/env bash
# rig.sh setup | cut RAIL | restore RAIL | remove RAIL | shape RAIL NETEM... | run COMMAND...
#
# Two rails between two "hosts" on one machine that has soft-RoCE: rxe0 and rxe1 on the ends of one
# pair of virtual Ethernet devices (rail 0), rxe2 and rxe3 on those of another (rail 1). Needs root
# in the first network namespace, iproute2, veth and rdma_rxe; meant for a throw-away machine, for it
# changes the routing rules. `run` sets both rails up and runs COMMAND, the C++ tests, over them.
set -euo pipefail

mac() { echo "02:00:00:77:0$1:0$(($2 + 1))"; }
address() { echo "10.77.$((70 + $1)).$(($2 + 1))"; }
device() { echo "roce$((2 * $1 + $2))"; }

# What the kernel forgets when a device goes down. Packets to the other end must take the wire, not
# the short cut within the machine, so each address is looked up in a table of its own.
connect() {
  local rail=$1 end
  for end in 0 1; do
    local other=$((1 - end)) dev
    dev=$(device "$rail" "$end")
    ip link set "$dev" up
    ip route replace "$(address "$rail" "$other")" dev "$dev" src "$(address "$rail" "$end")" \
      table $((200 + 2 * rail + end))
    ip neigh replace "$(address "$rail" "$other")" lladdr "$(mac "$rail" "$other")" dev "$dev" nud permanent
  done
}

setup() {
  local rail end dev
  # Whatever uses the names already is in the way.
  for rail in 0 1 2 3; do
    rdma link delete "rxe$rail" 2>/dev/null || true
    ip link delete "roce$rail" 2>/dev/null || true
  done
  for rail in 10 11 20 21; do
    while ip rule delete pref $rail 2>/dev/null; do :; done
  done
  for rail in 0 1; do
    ip link add "$(device $rail 0)" mtu 4500 address "$(mac $rail 0)" type veth \
      peer name "$(device $rail 1)" mtu 4500 address "$(mac $rail 1)"
    for end in 0 1; do
      dev=$(device $rail $end)
      ip addr add "$(address $rail $end)/24" dev "$dev"
      ip rule add pref 10 iif "$dev" lookup local
      ip rule add pref 20 to "$(address $rail $((1 - end)))" lookup $((200 + 2 * rail + end))
      echo 1 >"/proc/sys/net/ipv4/conf/$dev/accept_local"
      echo 0 >"/proc/sys/net/ipv4/conf/$dev/rp_filter"
    done
    connect $rail
  done
  # The table of local addresses comes behind those rules.
  [[ $(ip rule show) == *100:* ]] || ip rule add pref 100 lookup local
  ip rule delete pref 0 2>/dev/null || true
  for rail in 0 1; do
    for end in 0 1; do
      rdma link add "rxe$((2 * rail + end))" type rxe netdev "$(device $rail $end)"
    done
  done
}

command=$1
shift
case $command in
  setup) setup ;;
  cut) ip link set "$(device "$1" 1)" down ;;
  restore) connect "$1" ;;
  remove)
    for end in 0 1; do ip link set "$(device "$1" $end)" down; done
    # It goes for good when the adapters on it do, which those who use them delay.
    ip link delete "$(device "$1" 0)" >/dev/null 2>&1 &
    ;;
  shape)
    rail=$1
    shift
    for end in 0 1; do
      tc qdisc delete dev "$(device "$rail" $end)" root 2>/dev/null || true
      (($# == 0)) || tc qdisc add dev "$(device "$rail" $end)" root netem "$@"
    done
    ;;
  run)
    setup
    KVXFER_TEST_VERBS=rxe0,rxe2/rxe1,rxe3 KVXFER_TEST_RIG=$(realpath "$0") "$@"
    ;;
  *)
    echo "rig.sh: unknown command '$command'" >&2
    exit 2
    ;;
esac
