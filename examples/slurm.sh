#!/bin/bash
# Train on several machines of a Slurm cluster, with one torchrun per machine:
#
#     sbatch --nodes=4 --gpus-per-node=8 examples/slurm.sh run.toml --out /shared/runs/first
#
# Slurm sends SIGTERM five minutes before the time limit. torchrun passes it on, the run saves a checkpoint and ends, and
# --resume=auto continues when the job is submitted again. --requeue does so after the failure of a machine. torchrun waits for
# its ranks as long as TORCH_ELASTIC_SHUTDOWN_TIMEOUT says.
#SBATCH --job-name=dither
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${SLURM_GPUS_ON_NODE:?run this by sbatch}
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / gpus))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node="$gpus" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$head:29500" \
    --rdzv-id="$SLURM_JOB_ID" \
    --max-restarts=3 \
    --local-ranks-filter=0 \
    -m dither.cli train --resume=auto "$@"
