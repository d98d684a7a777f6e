#!/bin/sh
# Train on several machines by torchrun: run this on each of them, with the same arguments.
#
#     HEAD=node0 NODES=2 GPUS=8 examples/torchrun.sh run.toml --out /shared/runs/first
#
# HEAD is the name of one machine, which all of them reach. The folder of the run must be visible to all machines, and paths in the
# config must be the same on each. A rank that dies ends all ranks; torchrun then starts them again, up to three times, and
# --resume=auto continues from the newest checkpoint. [parallel] in the config says how the ranks share the model, such as
#
#     [parallel]
#     dp_replicate = 2    # one replica per machine: gradients alone cross the network
#     dp_shard = 8        # FSDP2 within a machine
set -eu

: "${HEAD:?the name of one machine}" "${NODES:?the number of machines}" "${GPUS:?ranks per machine}"

exec torchrun \
    --nnodes="$NODES" \
    --nproc-per-node="$GPUS" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$HEAD:${PORT:-29500}" \
    --rdzv-id="${JOB:-dither}" \
    --max-restarts="${RESTARTS:-3}" \
    --local-ranks-filter=0 \
    -m dither.cli train --resume=auto "$@"
