"""A small Slurm on this machine, as one user: munged, slurmctld and a slurmd for each node, on free ports.

Nodes are names alone: no name server knows them. No cgroups, so that a container can run it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from types import TracebackType

import psutil
from load import seconds, settles

_PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "squeue")
# Daemons are in sbin, which a user's path may lack.
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
WAIT_TIME_S = 3
"""So long after the first task has ended Slurm ends the other tasks of a step, unless it is told not to."""
# The settings that ask most of a job: others end a step where one of its tasks fails.
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillOnBadExit=1
WaitTime={wait_time_s}
KillWait=5
SlurmdTimeout=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """A sentence that names what Slurm lacks here; "" where it can run."""
    absent = [name for name in _PROGRAMS if name != "slurmstepd" and shutil.which(name, path=_PATH) is None]
    return f"no {', '.join(absent)} here (Debian: apt-get install slurm-wlm munge)" if absent else ""


class SlurmCluster:
    """A context manager. Leaving it ends all daemons and all processes of jobs, also where a job still runs."""

    def __init__(self, folder: Path, nodes: int) -> None:
        """folder: of settings, sockets and logs; short, since the path of a socket has 107 bytes."""
        self.folder, self.nodes = folder, [f"n{number}" for number in range(1, nodes + 1)]
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._of_node: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
        self.close()

    def call(self, *command: str) -> str:
        """The output of a command of Slurm. AssertionError with its text where it fails."""
        found = subprocess.run(
            command, env=self.env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=seconds(60),
        )  # fmt: skip
        assert found.returncode == 0, f"{command} ended with {found.returncode}: {found.stdout}"
        return found.stdout

    def sbatch(self, name: str, script: str, **variables: str) -> int:
        """Submit a batch script; the number of its job. Its output is in `folder/name.out`."""
        path = self.folder / name
        path.write_text(script)
        exported = ",".join(["ALL", *(f"{key}={value}" for key, value in variables.items())])
        words = ["sbatch", "--parsable", "--output", f"{name}.out", "--open-mode=append", f"--export={exported}"]
        return int(self.call(*words, str(path)))

    def write(self, name: str, text: str) -> None:
        """A file for a batch script, which finds it whole."""
        part = self.folder / f"{name}.part"
        part.write_text(text)
        part.rename(self.folder / name)

    def state(self, job: int | str) -> str:
        """RUNNING, COMPLETED and others."""
        words = dict(word.partition("=")[::2] for word in self.call("scontrol", "show", "job", str(job)).split())
        return words["JobState"]

    def lose(self, node: str) -> None:
        """Kill all that runs on a node at once, as when the host loses its power."""
        victims = [psutil.Process(self._of_node[node].pid), *self._processes_on(node)]
        for process in victims:
            process.suspend()  # none of them tells that another one has ended
        for process in victims:
            process.kill()
        self._of_node[node].wait()

    def close(self) -> None:
        # slurmctld first: it would start what was requeued.
        for daemon in self._daemons[1:] + self._daemons[:1]:
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        for node in self.nodes:
            for process in self._processes_on(node):
                process.kill()

    def _start(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.chmod(0o600)
        key.write_bytes(os.urandom(1024))
        host = socket.gethostname().partition(".")[0]
        control, *ports = _free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        user = psutil.Process().username()
        conf = _CONF.format(
            host=host, port=control, user=user, wait_time_s=WAIT_TIME_S, folder=self.folder, nodes="\n".join(lines)
        )
        Path(self.env["SLURM_CONF"]).write_text(conf)
        files = [f"--{what}={self.folder}/munge.{end}" for what, end in (("socket", "socket"), ("key-file", "key"))]
        files += [f"--{what}-file={self.folder}/munge.{what}" for what in ("log", "pid", "seed")]
        # Without --force it refuses folders that others may write to, and /tmp is one.
        self._daemon("munged", "--foreground", "--force", *files)
        assert settles((self.folder / "munge.socket").exists, 30), "munged does not listen"
        self._daemon("slurmctld", "-D")
        for node in self.nodes:
            self._of_node[node] = self._daemon("slurmd", "-D", "-N", node)
        assert settles(lambda: self._idle() == len(self.nodes), 30), self.call("sinfo")

    def _idle(self) -> int:
        found = subprocess.run(
            ["sinfo", "--noheader", "--format=%T %D"], env=self.env, capture_output=True, text=True, timeout=seconds(60)
        )
        return sum(int(line.split()[1]) for line in found.stdout.splitlines() if line.startswith("idle"))

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.{len(self._daemons)}.log").open("wb") as log:
            self._daemons.append(subprocess.Popen(command, env=self.env, cwd=self.folder, stdout=log, stderr=log))
        return self._daemons[-1]

    def _processes_on(self, node: str) -> list[psutil.Process]:
        """Of this cluster's jobs: tasks by Slurm's variables, and slurmstepd, which hides its own, by its log."""
        log = str(self.folder / f"slurmd.{node}.log")
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                is_task = env.get("SLURM_CONF") == self.env["SLURM_CONF"] and env.get("SLURMD_NODENAME") == node
                if is_task or (
                    process.name() == "slurmstepd" and any(each.path == log for each in process.open_files())
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
