#!/bin/bash
# Trains on the machines of a Slurm allocation, a process on each, with the trainer's flags as arguments:
#
#     sbatch --nodes=4 launch/slurm.sh --model=mt.M4Demo --data_dir=DATA --logdir=RUN
#
# Before the end of the allocation's time the run is saved. It then begins again in another allocation, as after a
# failure, and goes on where it was saved; up to ten times. See docs/training.md.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300

# srun gives a process one core by default. When one has ended, the others have two minutes.
srun --cpu-bind=none --wait=120 python -m lingvo_moe.trainer "$@" && exit 0
status=$?
if ((${SLURM_RESTART_COUNT:-0} < 10)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
