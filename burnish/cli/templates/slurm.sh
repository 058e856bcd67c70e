#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ processes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{ devices }}
#SBATCH --time={{ minutes }}
#SBATCH --signal=TERM@{{ grace }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# One process a node, with all of its devices. {{ grace }} s before the time is up every process gets SIGTERM: the run saves its last step and
# ends with 75, and the job goes back to the queue, from where it goes on.
# {{ folder }} must be on a file system that all nodes see.

export BURNISH__CLUSTER__DISTRIBUTED__COORDINATOR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{{ port }}"
export BURNISH__CLUSTER__DISTRIBUTED__NUM_PROCESSES="$SLURM_NTASKS"
export RESUME="$([ -d {{ folder | quote }} ] && echo --resume)"

# A process that fails is noticed, named and followed by the others; srun needn't end them.
srun --kill-on-bad-exit=0 bash -c \
    'BURNISH__CLUSTER__DISTRIBUTED__PROCESS_ID="$SLURM_PROCID" exec "$@" $RESUME' -- \
    {{ command }}
code=$?

[ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
