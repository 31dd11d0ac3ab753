#!/bin/bash
# Two DGX Sparks joined by their 200 Gb/s ports: run this on each.
#   HEAD=192.168.100.10 NODE_RANK=0 pretrain/launch/spark-pair.sh --zero-preset zeropp --config run.yaml
# A port shows as two devices, one for each half: NCCL takes both, with MTU 9000 (docs/guide/one-gpu-nodes.md).
set -eu
: "${HEAD:?the first one\'s address on the cable}" "${NODE_RANK:?0 on the first one}"
halves=$(rdma link | sed -n 's/^link \([^/ ]*\)\/.* state ACTIVE .*netdev \([^ ]*\).*/\1 \2/p')
[ "$(wc -l <<<"$halves")" -ge 2 ] || echo "one active half of the port alone: $halves" >&2
while read -r _ interface; do
    [ "$(cat "/sys/class/net/$interface/mtu")" -ge 9000 ] || echo "ip link set dev $interface mtu 9000" >&2
done <<<"$halves"
NCCL_IB_HCA=${NCCL_IB_HCA:-$(cut -d' ' -f1 <<<"$halves" | paste -sd,)}
NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$(cut -d' ' -f2 <<<"$halves" | head -n1)}    # where they meet
export NCCL_IB_HCA NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME="$NCCL_SOCKET_IFNAME"
exec torchrun --nnodes 2 --node-rank "$NODE_RANK" --nproc-per-node 1 --master-addr "$HEAD" --master-port 29500 \
    -m megazero train "$@"
