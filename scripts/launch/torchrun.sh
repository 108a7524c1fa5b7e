#!/usr/bin/env bash
# Trains on all GPUs of one machine or several under torchrun, which only starts the processes: no PyTorch is used.
#
#   bash scripts/launch/torchrun.sh --model d12 --data 'shards/*_train_*.bin' --accumulate 8     one machine
#   NODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash scripts/launch/torchrun.sh ...                     on each of four, NODE_RANK 0 to 3
#
# --accumulate counts the micro-steps of all GPUs together, so it is a multiple of their number. The run folder (--out) must be on a
# file system that all machines share. MASTER_PORT (default 29500) is torchrun's; the ranks meet on the next port.
set -euo pipefail
# A secret that these ranks have, and no others. On several machines give all the same: make it once, with the command below.
if ((${NODES:-1} == 1)); then
    export IRONHORSE_TOKEN=${IRONHORSE_TOKEN:-$(head -c 24 /dev/urandom | base64)}
elif [[ ! ${IRONHORSE_TOKEN:-} ]]; then
    echo "note: set IRONHORSE_TOKEN to the same secret on all machines: head -c 24 /dev/urandom | base64" >&2
fi
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
exec torchrun --no-python --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$gpus" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    "${IRONHORSE:-ironhorse}" train "$@"
