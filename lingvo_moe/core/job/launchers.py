"""Recognises the launcher that started this process, by the variables that it sets, and the process's place in the job.

JAX's own detection is not used: it does not know Open MPI 5 or several replicas of a JobSet, waits for ever in an
interactive step of Slurm, and shows each process one GPU only.
"""

import os
import re
import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

# Where libtpu finds no TPU, it gives its variables a text that begins so, and processes started afterwards inherit it.
_LIBTPU_KNOWS_NONE = "WARNING: "
_JOBSET = ("JOB_INDEX", "JOB_REPLICAS", "PROCESSES_IN_JOB", "JAX_COORDINATOR_ADDRESS")


class JobError(ValueError):
    """Processes that cannot be one job, or one of which has failed."""


@dataclass(frozen=True)
class Launch:
    """The place of this process in the job that a launcher started."""

    launcher: str  # its name, for messages
    count: int  # the processes of the job
    number: int  # of this process, from 0
    address: str  # host:port at which process 0 is to listen; '' if the variables do not say it
    # The number of this process among those of its machine, and their count; None where each process sees devices of
    # its own already.
    local: tuple[int, int] | None = None
    # Whether every command on the machine sees these variables, also one that nobody started on the others.
    of_machine: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise JobError(
                f"{self.launcher}: its variables make this process number {self.number} of {self.count}; "
                "the processes of a job are numbered 0..count-1"
            )


class _Variables:
    """The variables of one launcher; Text and Integer are for those whose absence is an error."""

    def __init__(self, launcher: str, environ: Mapping[str, str]):
        self.launcher, self._environ = launcher, environ

    def Get(self, name: str) -> str:
        """The value of a variable, '' where there is none."""
        return self._environ.get(name, "")

    def Text(self, name: str) -> str:
        """The value of a variable that the launcher sets. Raises JobError: it is not set."""
        if not (value := self.Get(name)):
            raise JobError(
                f"{self.launcher}: has set no variable {name}; set it as in launch/, or unset the launcher's variables "
                "and give --coordinator_address, --num_processes and --process_id"
            )
        return value

    def Integer(self, name: str) -> int:
        """Raises JobError: there is none, or it is no integer."""
        if not re.fullmatch("[0-9]{1,9}", value := self.Text(name)):
            raise JobError(f"{self.launcher}: {name}={value}: expected an integer")
        return int(value)


def find(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Returns the place that a launcher gave to this process; None where none started it.

    Raises:
        JobError: some variable of the launcher is missing, or has a value that it cannot have.
    """
    # Slurm comes after Open MPI, whose mpirun may start its own helpers by srun; TPUs come before the JobSet that
    # holds them, since a TPU's runtime numbers the processes.
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _open_mpi(_Variables("Open MPI", environ))
    if "PMI_SIZE" in environ and "MPI_LOCALNRANKS" in environ:
        return _hydra(_Variables("MPI", environ))
    if "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ:
        return _slurm(_Variables("Slurm", environ))
    names = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if names and not names.startswith(_LIBTPU_KNOWS_NONE):
        return _tpu(_Variables("TPU", environ), names.split(","))
    if "JOB_COMPLETION_INDEX" in environ and any(name in environ for name in _JOBSET):
        return _jobset(_Variables("JobSet", environ))
    return None


def _open_mpi(variables: _Variables) -> Launch:
    local = (
        variables.Integer("OMPI_COMM_WORLD_LOCAL_RANK"),
        variables.Integer("OMPI_COMM_WORLD_LOCAL_SIZE"),
    )
    count, number = (
        variables.Integer("OMPI_COMM_WORLD_SIZE"),
        variables.Integer("OMPI_COMM_WORLD_RANK"),
    )
    job = variables.Get("PMIX_NAMESPACE")
    # Both name the host of mpirun: "1894514688.0;tcp://10.0.0.1,10.1.0.1:35817" of version 4, and
    # "prterun-node1-7178@1" of version 5.
    uri = re.search(r"tcp://([^,:]+)", variables.Get("OMPI_MCA_orte_hnp_uri"))
    name = re.fullmatch(r"(?:prterun|prte)-(.+)-\d+@\d+", job)
    host = "127.0.0.1" if local[1] == count else (uri or name or ("", ""))[1]
    return Launch(variables.launcher, count, number, f"{host}:{_port(job)}" if host else "", local)


def _hydra(variables: _Variables) -> Launch:
    """MPICH and Intel MPI."""
    local = variables.Integer("MPI_LOCALRANKID"), variables.Integer("MPI_LOCALNRANKS")
    count, number = variables.Integer("PMI_SIZE"), variables.Integer("PMI_RANK")
    return Launch(variables.launcher, count, number, "", local)


def _slurm(variables: _Variables) -> Launch:
    # Of the step: in an interactive one SLURM_NTASKS is that of the allocation.
    count, number = variables.Integer("SLURM_STEP_NUM_TASKS"), variables.Integer("SLURM_PROCID")
    nodes = variables.Text("SLURM_STEP_NODELIST")  # e.g. "node[007-010,12],other" or "node1"
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if first is None:
        raise JobError(f"Slurm: SLURM_STEP_NODELIST={nodes}: expected names of machines")
    job = f"{variables.Text('SLURM_JOB_ID')}.{variables.Text('SLURM_STEP_ID')}"
    address = f"{first[1]}{first[2] or ''}:{_port(job)}"
    local = None
    if not (variables.Get("SLURM_GPUS_PER_TASK") or variables.Get("SLURM_TRES_PER_TASK")):
        tasks = _tasks_of_nodes(variables.Get("SLURM_STEP_TASKS_PER_NODE"))
        node = variables.Integer("SLURM_NODEID")
        local = (variables.Integer("SLURM_LOCALID"), tasks[node]) if node < len(tasks) else None
    return Launch(variables.launcher, count, number, address, local)


def _tasks_of_nodes(text: str) -> list[int]:
    """Reads Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in runs for _ in range(int(times or 1))]


def _tpu(variables: _Variables, workers: list[str]) -> Launch:
    slices, part = 1, 0
    if coordinator := variables.Get("MEGASCALE_COORDINATOR_ADDRESS"):
        slices, part = (
            variables.Integer("MEGASCALE_NUM_SLICES"),
            variables.Integer("MEGASCALE_SLICE_ID"),
        )
    host = (coordinator or workers[0]).split(":")[0]
    worker = variables.Integer("TPU_WORKER_ID") if len(workers) > 1 else 0
    number = part * len(workers) + worker
    count = slices * len(workers)
    return Launch(variables.launcher, count, number, f"{host}:8482", of_machine=True)


def _jobset(variables: _Variables) -> Launch:
    pods = variables.Integer("PROCESSES_IN_JOB")
    count = variables.Integer("JOB_REPLICAS") * pods
    number = variables.Integer("JOB_INDEX") * pods + variables.Integer("JOB_COMPLETION_INDEX")
    address = variables.Text("JAX_COORDINATOR_ADDRESS")
    address = address if ":" in address else f"{address}:8476"
    return Launch(variables.launcher, count, number, address, of_machine=True)


def place(
    launch: Launch | None, address: str, count: int | None, number: int | None
) -> tuple[int, int]:
    """Returns the count of processes and the number of this one, from flags, and from the launcher where none is given.

    Raises:
        JobError: the flags contradict the launcher, or say too little.
    """
    if launch is None:
        if address and count is None:
            raise JobError(
                f"--coordinator_address={address}: goes with --num_processes and --process_id, or with a launcher "
                "(srun, mpirun, a JobSet), and none has started this process"
            )
        return count or 1, number or 0
    if count not in (None, launch.count):
        raise JobError(
            f"--num_processes={count}: {launch.launcher} has started {launch.count}; leave the flag out, or "
            f"start {count} with the launcher"
        )
    return launch.count, launch.number if number is None else number


def allocation_note(environ: Mapping[str, str] = os.environ) -> str:
    """A line for the user of a Slurm allocation of several tasks that srun has not started; '' elsewhere."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" not in environ or tasks == "1" or find(environ) is not None:
        return ""
    return (
        f"note: this allocation of Slurm is for {tasks} tasks, but srun did not start this process, so it trains "
        "alone; srun python -m lingvo_moe.trainer ... starts them all"
    )


def address_of(launch: Launch, patience: float = 60.0) -> str:
    """Returns host:port of process 0. Where no variable says it, process 0 tells the others through mpi4py, if it is
    installed. All processes of the job have to call it.

    `patience`: seconds that process 0 waits for a name that nobody knows yet, as of a new pod.

    Raises:
        JobError: it cannot be found, or process 0 is this one and runs on another machine.
    """
    address = launch.address or _told_by_mpi(launch)
    host = address.rpartition(":")[0]
    if launch.number == 0 and not _is_here(host, patience):
        raise JobError(
            f"{launch.launcher}: its variables say that process 0 is at {host}, which is no name or address of its "
            f"machine {socket.gethostname()}; give all processes --coordinator_address=HOST:PORT, with one they know"
        )
    return address


def _told_by_mpi(launch: Launch) -> str:
    give = "give all processes --coordinator_address=HOST:PORT, a free port on the machine of process 0"
    try:
        from mpi4py import MPI
    except ImportError as e:
        raise JobError(
            f"{launch.launcher}: no variable says where process 0 is; {give}, or install mpi4py ({e})"
        ) from None
    world = MPI.COMM_WORLD
    if world.Get_size() != launch.count:
        raise JobError(
            f"mpi4py sees {world.Get_size()} processes, but {launch.launcher} has started {launch.count}, so it was "
            f"built for another MPI; {give}"
        )
    address = ""
    if launch.number == 0:
        with socket.socket() as s:
            s.bind(("", 0))
            address = f"{socket.gethostname()}:{s.getsockname()[1]}"
    address = world.bcast(address, root=0)
    MPI.Finalize()  # the rest of the job does not use it
    return address


def local_gpus(
    launch: Launch | None, environ: Mapping[str, str], there_are: int
) -> list[int] | None:
    """Returns the GPUs that this process is to use, its part of those of the machine; None: all that it sees.

    `there_are`: GPUs of the machine, where CUDA_VISIBLE_DEVICES does not say which ones it may use.
    """
    if launch is None or launch.local is None or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = there_are if visible is None else len(list(filter(None, visible.split(","))))
    number, count = launch.local
    share = gpus // count
    return list(range(number * share, (number + 1) * share)) if count > 1 and share else None


def _port(job: str) -> int:
    """A port for a job, the same in its processes and most likely another for another job.

    It is above those that Linux gives to connections.
    """
    return 61440 + zlib.crc32(job.encode()) % 4096


def _is_here(host: str, patience: float) -> bool:
    """Whether a name or an address is one of this machine's."""
    end = time.monotonic() + patience
    while True:
        try:
            addresses = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
            break
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(min(1.0, patience))
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as s:
                s.bind(address)
                return True
        except OSError:
            continue
    return False
