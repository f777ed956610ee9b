#!/bin/bash
# One torchrun on each node of a Slurm job, which meet at the first node:
#
#     sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh train.py --its --arguments
#
# A rank that dies restarts all ranks, up to RESTARTS times; a script that begins with
# fsdp_dynamo.checkpoint.load() then goes on from its newest checkpoint. Write checkpoints, and
# FSDP_DYNAMO_FLIGHT, to a folder that all nodes see.

#SBATCH --job-name=fsdp_dynamo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out

set -euo pipefail

if [ $# -eq 0 ]; then
    echo "slurm.sh: expected a script and its arguments, got none: sbatch slurm.sh train.py" >&2
    exit 2
fi

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export ENDPOINT="${nodes%%$'\n'*}:${PORT:-29500}"
export RANKS=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
export RESTARTS=${RESTARTS:-3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# In each node's own shell: its name and number are known there only.
srun --kill-on-bad-exit=1 bash -c '
    is_host=$([ "$SLURM_NODEID" = 0 ] && echo true || echo false)
    exec torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$RANKS" \
        --max-restarts "$RESTARTS" --local-addr "$SLURMD_NODENAME" \
        --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$ENDPOINT" \
        --rdzv-conf "is_host=$is_host" "$@"
' bash "$@"
