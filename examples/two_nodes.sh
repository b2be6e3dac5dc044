#!/usr/bin/env bash
# Two torchrun agents on this machine, over loopback, as if they were two nodes with PROCESSES processes each (1).
#
#     bash examples/two_nodes.sh                        # examples/plain_ddp.py
#     bash examples/two_nodes.sh --sparsifier exdyna --fast
#     PROCESSES=2 SCRIPT=my_training.py bash examples/two_nodes.sh --its arguments
#
# On two real machines: the same torchrun command on each, --node-rank 0 and 1, --master-addr that of the first one.
# Where gloo or NCCL choose the wrong network: GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0 (names: `ip address`).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=${SCRIPT:-$here/plain_ddp.py}
python=${PYTHON:-python}
# A port that is free now; a fixed one, the same on all nodes, on real machines.
port=${PORT:-$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

agents=()
trap 'kill "${agents[@]}" 2>/dev/null || true' EXIT # an agent ends its ranks; without this the other one would wait
for node in 0 1; do
    "$python" -m torch.distributed.run --nnodes 2 --node-rank "$node" --nproc-per-node "${PROCESSES:-1}" \
        --master-addr 127.0.0.1 --master-port "$port" "$script" "$@" &
    agents+=($!)
done
wait -n "${agents[@]}" # whichever ends first
wait "${agents[@]}"
