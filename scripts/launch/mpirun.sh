#!/usr/bin/env bash
# Trains under mpirun, which only starts the processes: no MPI library is used.
#
#   bash scripts/launch/mpirun.sh 8 --model d12 --data 'shards/*_train_*.bin' --accumulate 8              eight GPUs of this machine
#   HOSTFILE=hosts bash scripts/launch/mpirun.sh 32 --model d12 ... --out /shared/runs/a                   several machines
#
# The first host is where rank 0 runs; its name and a port reach all ranks by the environment.
set -euo pipefail
ranks=${1:?how many ranks}; shift
hosts=()
first=127.0.0.1
if [[ ${HOSTFILE:-} ]]; then
    hosts=(--hostfile "$HOSTFILE")
    first=$(awk 'NF && $1 !~ /^#/ { print $1; exit }' "$HOSTFILE")
fi
# a secret that these ranks have, and no others; its value is not on the command line, which others can see
IRONHORSE_TOKEN=${IRONHORSE_TOKEN:-$(head -c 24 /dev/urandom | base64)}
export IRONHORSE_TOKEN
exec mpirun -np "$ranks" "${hosts[@]}" -x MASTER_ADDR="$first" -x MASTER_PORT="${MASTER_PORT:-29500}" -x IRONHORSE_TOKEN \
    "${IRONHORSE:-ironhorse}" train "$@"
