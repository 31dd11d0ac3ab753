#!/bin/bash
# Instances that reach each other by TCP (AWS without EFA, GCP without GPUDirect, any rented pair): run this on each.
#   HEAD=10.0.0.1 NNODES=2 NODE_RANK=0 pretrain/launch/instances.sh --config run.yaml --save /runs/a --load /runs/a
# The port 29500 and NCCL's ports have to be open between them: a security group, or a firewall rule, for the subnet.
set -eu
: "${HEAD:?the first node\'s private address}" "${NNODES:?how many nodes}" "${NODE_RANK:?0 on the first node}"
interface=$(ip -o route get "$HEAD" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
[ "$interface" != lo ] || interface=$(ip -o route get 1.1.1.1 | sed -n 's/.* dev \([^ ]*\).*/\1/p')
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
# One TCP connection has 5 Gb/s on AWS outside of a placement group, 10 inside: several carry what the instance has.
export NCCL_SOCKET_NTHREADS=${NCCL_SOCKET_NTHREADS:-4} NCCL_NSOCKS_PERTHREAD=${NCCL_NSOCKS_PERTHREAD:-4}
exec torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" -m megazero train "$@"
