#!/bin/bash
#SBATCH --job-name=big-run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=1440
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# One process a node, with all of its devices. 120 s before the time is up every process gets SIGTERM: the run saves its last step and
# ends with 75, and the job goes back to the queue, from where it goes on.
# runs/Big_run must be on a file system that all nodes see.

export BURNISH__CLUSTER__DISTRIBUTED__COORDINATOR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):8476"
export BURNISH__CLUSTER__DISTRIBUTED__NUM_PROCESSES="$SLURM_NTASKS"
export RESUME="$([ -d runs/Big_run ] && echo --resume)"

# A process that fails is noticed, named and followed by the others; srun needn't end them.
srun --kill-on-bad-exit=0 bash -c \
    'BURNISH__CLUSTER__DISTRIBUTED__PROCESS_ID="$SLURM_PROCID" exec "$@" $RESUME' -- \
    burnish train recipes/quickstart.yaml run.name=Big_run 'cluster.actor.axes={data: 2, fsdp: 8}'
code=$?

[ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
