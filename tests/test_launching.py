"""Two processes that real launchers start train as one process does: mpirun, and srun on two daemons of Slurm."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_testing import losses

from lingvo_moe import trainer

pytestmark = pytest.mark.slow

_LAUNCH = Path(__file__).resolve().parents[1] / "launch"
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])


def _needs(program: str, packages: str) -> pytest.MarkDecorator:
    lacks = shutil.which(program, path=_PATH) is None
    return pytest.mark.skipif(lacks, reason=f"needs {program}: apt-get install {packages}")


def _flags(run: Path) -> list[str]:
    override = "--model_params_override=train.summary_interval_steps=1"
    return ["--model=toy_task.Line", f"--logdir={run}", "--max_steps=3", "--mesh=data:8", override]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PATH": _PATH, "PYTHONPATH": os.pathsep.join(sys.path), **more}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process with eight devices."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert trainer.main(_flags(run)) == 0
    return losses(run)


@_needs("mpirun", "openmpi-bin")
def test_mpirun(alone, tmp_path):
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [_LAUNCH / "mpirun.sh", "localhost:2", *_flags(tmp_path / "run"), "--num_devices=4"]
    done = subprocess.run(
        command, env=_environment(**as_root), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for number in range(2):
        assert f"process {number} of 2: joining the job at 127.0.0.1:" in done.stderr
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


_SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={host}x NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment for the commands of a cluster of two nodes, which are two daemons on this machine."""
    host, ports = socket.gethostname().split(".")[0], []
    for _ in range(3):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        _SLURM_CONF.format(host=host, ports=ports, user=getpass.getuser(), directory=tmp_path)
    )
    environment = _environment(SLURM_CONF=str(conf))
    commands = [["slurmctld", "-D", "-c"]]
    for node in (host, f"{host}x"):
        (tmp_path / node).mkdir()
        commands.append(["slurmd", "-D", "-N", node])
    with open(tmp_path / "log", "w") as log:
        daemons = [
            subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            for command in commands
        ]
        try:
            for _ in range(300):
                state = ["sinfo", "--noheader", "--format=%D %t"]
                seen = subprocess.run(state, env=environment, capture_output=True, text=True)
                if seen.stdout.strip() == "2 idle":
                    break
                time.sleep(0.1)
            else:
                raise AssertionError((tmp_path / "log").read_text())
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()


@_needs("slurmctld", "slurmctld slurmd slurm-client")
def test_srun_on_two_nodes(alone, slurm, tmp_path):
    run, said = tmp_path / "run", tmp_path / "said"
    command = ["sbatch", f"--output={said}", _LAUNCH / "slurm.sh", *_flags(run), "--num_devices=4"]
    subprocess.run(command, env=slurm, check=True, capture_output=True)
    state, until = "PENDING", time.monotonic() + 300
    while state in ("PENDING", "RUNNING", "COMPLETING"):  # sbatch --wait looks ever more seldom
        assert time.monotonic() < until, state
        time.sleep(0.2)
        look = ["squeue", "--noheader", "--states=all", "--format=%T"]
        state = subprocess.run(look, env=slurm, capture_output=True, text=True).stdout.strip()
    text = said.read_text()
    assert state == "COMPLETED", text
    for number in range(2):
        told = f"process {number} of 2: joining the job at {socket.gethostname().split('.')[0]}:"
        assert told in text
    assert losses(run) == pytest.approx(alone, rel=1e-5)
