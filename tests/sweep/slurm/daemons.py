"""A SLURM of one node, started for a test from Debian's packages and stopped by the ids of its processes.

Everything of it lies in one folder: keys, sockets, state, logs; nothing of a SLURM that is installed here is touched.
It keeps no accounts, as small clusters do, and a job that is put back into the queue starts again after seconds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rung.sweep.point import dies_with_parent
from tests.sweep.made import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun", "scancel")
NUM_CPUS = 3
CONF = """
ClusterName=rungtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=60
ReturnToService=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs={num_cpus} RealMemory=4096 State=UNKNOWN
PartitionName=plain Nodes=node1 Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=node1 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no SLURM here; empty where there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "needs root, as slurmd does"


@contextmanager
def running(folder: Path) -> Iterator[Mapping[str, str]]:
    """Gives the variables by which sbatch and its kin find it."""
    env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    processes: list[subprocess.Popen[bytes]] = []
    _write(folder)

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("wb") as out:
            options = {"start_new_session": True, "preexec_fn": dies_with_parent()}
            processes.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=out, stderr=out, **options))

    def answers(*command: str) -> str:
        assert all(one.poll() is None for one in processes), _said(folder)
        return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True).stdout

    try:
        key, munge = str(folder / "munge.key"), folder / "munge.sock"
        start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}",
              f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
              f"--seed-file={folder}/munged.seed")  # fmt: skip
        wait_for(munge.exists)
        start("slurmctld", "-D", "-f", env["SLURM_CONF"])
        wait_for(lambda: "is UP" in answers("scontrol", "ping"))
        start("slurmd", "-D", "-N", "node1", "-f", env["SLURM_CONF"])
        wait_for(lambda: "idle" in answers("sinfo", "--noheader", "--format=%T"))
        yield env
    finally:
        subprocess.run(["scancel", "--user=root"], env={**os.environ, **env}, capture_output=True)
        with contextlib.suppress(AssertionError):  # what hangs is ended with its daemons
            wait_for(lambda: not answers("squeue", "--noheader"), deadline_s=30)
        for one in reversed(processes):
            one.terminate()
            try:
                one.wait(30)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def _write(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    controller_port, node_port = _free_ports(2)
    (folder / "slurm.conf").write_text(
        CONF.format(
            folder=folder,
            host=socket.gethostname(),
            controller_port=controller_port,
            node_port=node_port,
            num_cpus=NUM_CPUS,
        )
    )


def _free_ports(num: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [int(one.getsockname()[1]) for one in taken]
    for one in taken:
        one.close()
    return ports


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # where Debian puts daemons


def _said(folder: Path) -> str:
    return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1000:]}" for file in folder.glob("*.out"))
