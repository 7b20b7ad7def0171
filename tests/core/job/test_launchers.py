"""Launchers by the variables that they set: those of Slurm 22.05 and of Open MPI 4.1 and 5.0 are as recorded."""

import sys
from types import SimpleNamespace

import pytest
from refusals import refusals

from lingvo_moe.core.engine import devices
from lingvo_moe.core.job import launchers
from lingvo_moe.core.job.launchers import JobError, Launch

_SLURM = """
SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[3-4] SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4
SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1
"""
_OPEN_MPI = """
OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1
"""
_OPEN_MPI_4 = f"""{_OPEN_MPI} PMIX_NAMESPACE=1894514689
OMPI_MCA_orte_hnp_uri=1894514688.0;tcp://192.0.2.2,10.0.0.2:35817;tcp6://[fd00::2]:43325
"""
_JOBSET = """
JOB_COMPLETION_INDEX=1 JOB_INDEX=2 JOB_REPLICAS=3 PROCESSES_IN_JOB=4
JAX_COORDINATOR_ADDRESS=train-workers-0-0.train
"""
_TPU = "TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=t0,t1"


def _find(*variables):
    return launchers.find(dict(pair.split("=", 1) for part in variables for pair in part.split()))


def test_variables_that_libtpu_sets_without_a_tpu_are_no_launchers():
    text = "WARNING: could not determine TPU worker hostnames or IP addresses, please set env var"
    assert launchers.find({"TPU_WORKER_HOSTNAMES": text, "TPU_WORKER_ID": "WARNING: no"}) is None


@pytest.mark.parametrize("variables, launcher, count, number, host, local", [
    (_SLURM, "Slurm", 4, 3, "node3", (1, 2)),
    (f"{_SLURM} SLURM_STEP_NODELIST=a-1,node[3-4]", "Slurm", 4, 3, "a-1", (1, 2)),
    (f"{_SLURM} SLURM_STEP_NODELIST=n[007,9]", "Slurm", 4, 3, "n007", (1, 2)),
    (f"{_SLURM} SLURM_STEP_TASKS_PER_NODE=1,3", "Slurm", 4, 3, "node3", (1, 3)),
    (f"{_SLURM} SLURM_GPUS_PER_TASK=1", "Slurm", 4, 3, "node3", None),
    # An interactive step: one process, in an allocation for four.
    (f"{_SLURM} SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0", "Slurm", 1, 0, "node3", (1, 2)),
    (_OPEN_MPI_4, "Open MPI", 4, 3, "192.0.2.2", (1, 2)),
    (f"{_SLURM} {_OPEN_MPI_4}", "Open MPI", 4, 3, "192.0.2.2", (1, 2)),
    (f"{_OPEN_MPI} PMIX_NAMESPACE=prterun-node-1-7178@1", "Open MPI", 4, 3, "node-1", (1, 2)),
    (f"{_OPEN_MPI} OMPI_COMM_WORLD_LOCAL_SIZE=4", "Open MPI", 4, 3, "127.0.0.1", (1, 4)),
    ("PMI_SIZE=4 PMI_RANK=3 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1", "MPI", 4, 3, "", (1, 2)),
    (_JOBSET, "JobSet", 12, 9, "train-workers-0-0.train", None),
    (_TPU, "TPU", 2, 1, "t0", None),
    ("TPU_PROCESS_ADDRESSES=t0:8471", "TPU", 1, 0, "t0", None),
    (f"{_TPU} {_JOBSET} MEGASCALE_COORDINATOR_ADDRESS=s0:80 MEGASCALE_NUM_SLICES=3 MEGASCALE_SLICE_ID=2",
     *("TPU", 6, 5, "s0", None)),
])  # fmt: skip
def test_variables_of_launchers(variables, launcher, count, number, host, local):
    found = _find(variables)
    assert (found.launcher, found.count, found.number) == (launcher, count, number)
    assert (found.address.rpartition(":")[0], found.local) == (host, local)


def test_processes_of_a_job_agree_on_the_address_and_other_jobs_have_another():
    others = "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0"
    assert _find(_SLURM).address == _find(_SLURM, others).address
    assert _find(_SLURM).address != _find(_SLURM, "SLURM_STEP_ID=1").address
    assert _find(_JOBSET, "JAX_COORDINATOR_ADDRESS=h:1").address == "h:1"


@pytest.mark.parametrize("variables", [
    "",
    "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0",  # a script of sbatch
    "SLURM_JOB_ID=7 SLURM_NTASKS=4",  # a shell of salloc
    "JOB_COMPLETION_INDEX=3 KUBERNETES_SERVICE_HOST=10.0.0.1",  # of jobs that are independent
])  # fmt: skip
def test_no_launcher(variables):
    assert _find(variables) is None


def test_an_allocation_without_srun_is_noted():
    shell = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    assert "is for 4 tasks, but srun did not start" in launchers.allocation_note(shell)
    assert not launchers.allocation_note({**shell, "SLURM_NTASKS": "1"})
    assert not launchers.allocation_note(dict(pair.split("=") for pair in _SLURM.split()))


test_contradictions = refusals(JobError,
    (lambda: _find("OMPI_COMM_WORLD_SIZE=2"), "has set no variable OMPI_COMM_WORLD_LOCAL_RANK"),
    (lambda: _find("TPU_WORKER_HOSTNAMES=t0,t1"), "TPU: has set no variable TPU_WORKER_ID"),
    (lambda: _find(_JOBSET, "JOB_INDEX=two"), "JobSet: JOB_INDEX=two: expected an integer"),
    (lambda: _find(_JOBSET, "JOB_INDEX=3"), "number 13 of 12"),
    (lambda: _find("JOB_COMPLETION_INDEX=0 JOB_INDEX=0"), "no variable PROCESSES_IN_JOB"),
    (lambda: launchers.place(_find(_SLURM), "", 2, None), "=2: Slurm has started 4; leave"),
    (lambda: launchers.place(None, "h:1", None, 1), "h:1: goes with --num_processes and"),
    (lambda: launchers.address_of(Launch("MPI", 2, 0, "192.0.2.77:80")), "at 192.0.2.77, which is no"),
    (lambda: launchers.address_of(Launch("Slurm", 2, 0, "no-node.invalid:80"), patience=0.1),
     "at no-node.invalid, which is no name or address of its machine"),
    plain=True,
)  # fmt: skip


def test_flags_win_over_the_launcher():
    assert launchers.place(None, "", None, None) == (1, 0)
    assert launchers.place(_find(_SLURM), "", None, None) == (4, 3)
    assert launchers.place(_find(_SLURM), "h:1", 4, 2) == (4, 2)


def test_mpi4py_tells_an_address_that_no_variable_has(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(JobError, match="or install mpi4py"):
        launchers.address_of(Launch("MPI", 2, 0, ""))
    told = []
    world = SimpleNamespace(
        Get_size=lambda: 2, bcast=lambda address, root: told.append(address) or address
    )
    mpi = SimpleNamespace(COMM_WORLD=world, Finalize=lambda: told.append("finalized"))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    assert [launchers.address_of(Launch("MPI", 2, 0, "")), "finalized"] == told
    with pytest.raises(JobError, match="mpi4py sees 2 processes, but MPI has started 3"):
        launchers.address_of(Launch("MPI", 3, 0, ""))


@pytest.mark.parametrize("local, environ, gpus, used", [
    ((1, 2), {}, 8, [4, 5, 6, 7]),
    ((7, 8), {}, 8, [7]),
    ((0, 1), {}, 8, None),
    ((1, 2), {}, 0, None),
    ((1, 2), {"CUDA_VISIBLE_DEVICES": "0,1"}, 8, [1]),
    ((1, 2), {"CUDA_VISIBLE_DEVICES": "3"}, 8, None),  # a launcher that gives each its own
    ((1, 2), {"JAX_LOCAL_DEVICE_IDS": "0"}, 8, None),
    (None, {}, 8, None),
])  # fmt: skip
def test_gpus_of_a_machine_are_divided(local, environ, gpus, used):
    launch = Launch("Slurm", 8, 0, "", local)
    assert launchers.local_gpus(launch, environ, gpus) == used


def test_a_job_in_which_jax_finds_another_count_is_refused(monkeypatch):
    calls = []
    jax = SimpleNamespace(
        config=SimpleNamespace(update=lambda *_: None),
        distributed=SimpleNamespace(initialize=lambda *args, **named: calls.append((args, named))),
        devices=devices.jax.devices,
        process_count=lambda: 1,
    )
    monkeypatch.setattr(devices, "jax", jax)
    monkeypatch.setattr(devices.gpu_settings, "count_gpus", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in (pair.split("=") for pair in _SLURM.split()):
        monkeypatch.setenv(name, value)
    met = SimpleNamespace(address="127.0.0.1:1", Join=lambda seconds: None)
    monkeypatch.setattr(devices, "meet", lambda *_: met)
    with pytest.raises(JobError, match="process 3 of 4: JAX has found 1 processes on cpu"):
        devices.initialize_distributed("127.0.0.1:1", 4, 3)
    [(args, named)] = calls
    assert args == ("127.0.0.1:1", 4, 3, [4, 5, 6, 7])
    assert named["cluster_detection_method"] == "deactivate"
