#!/bin/bash
# Trains on some machines with Open MPI, 4 or 5: HOST,HOST,... and the trainer's flags as arguments. HOST:2 is two
# processes on a machine.
#
#     launch/mpirun.sh node0,node1 --model=mt.M4Demo --data_dir=DATA --logdir=RUN
#
# The first host is the one on which it is called, where process 0 listens. The same command goes on after a failure.
# See docs/jobs.md.
set -euo pipefail
hosts=$1
shift
# mpirun gives a process one core by default.
exec mpirun --host "$hosts" --bind-to none -x PATH python -m lingvo_moe.trainer "$@"
