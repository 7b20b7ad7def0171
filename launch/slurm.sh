#!/bin/bash
# Trains on the machines of a Slurm allocation, a process on each, with the trainer's flags as arguments:
#
#     sbatch --nodes=4 launch/slurm.sh --model=mt.M4Demo --data_dir=DATA --logdir=RUN
#
# Before the end of the allocation's time the run is saved. It then begins again in another allocation, as after a
# failure, and goes on where it was saved; up to ten times. With --elastic among the flags, give sbatch --no-kill: the
# others then go on when a machine is lost. See docs/jobs.md.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300

# srun gives a process one core by default. When one has ended, the others have two minutes, or go on.
ends=(--wait=120)
if [[ " $* " == *" --elastic "* ]]; then ends=(--no-kill --kill-on-bad-exit=0 --wait=0); fi
srun --cpu-bind=none "${ends[@]}" python -m lingvo_moe.trainer "$@" && exit 0
status=$?
if ((${SLURM_RESTART_COUNT:-0} < 10)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
