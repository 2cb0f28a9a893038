"""A Slurm of one node with accounting and eight made-up GPUs, in a folder of its own, for tests.

Munge, MariaDB, slurmdbd, slurmctld and slurmd run as the caller, who must be root, with their own keys, sockets and
free ports of the loopback; nothing outside the folder is written but control groups that Slurm makes for its jobs'
memory, where the machine has them. Debian packages: slurm-wlm slurmdbd munge mariadb-server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacct")
GPUS, CPUS, MEMORY_MB = 8, 16, 16000
NULL = os.makedev(1, 3)  # /dev/null: what a made-up GPU is

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ctld}
SlurmdPort={slurmd}
AuthType=auth/munge
# A job that is put back into the queue starts only when its credential is worthless, by default after two minutes.
AuthInfo=socket={root}/munge/sock,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
KillWait=15
MinJobAge=300
JobRequeue=1
# The machine may have fewer processors and less memory than the node says.
SlurmdParameters=config_overrides
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd}
AccountingStoragePass={root}/munge/sock
AccountingStorageTRES=gres/gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=low Nodes={node} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={node} Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

SLURMDBD_CONF = """
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/sock
LogFile={root}/log/slurmdbd.log
PidFile={root}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""


def missing() -> str:
    """Why there can be no such cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    gone = [
        name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None
    ]
    if gone:
        return f"not installed: {', '.join(gone)}"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            os.mknod(f"{scratch}/null", 0o666 | stat.S_IFCHR, NULL)
        except OSError as error:
            return f"made-up GPUs need device files ({error})"
    return ""


class Cluster:
    """The daemons of one cluster below `root`, which must not exist."""

    def __init__(self, root: Path) -> None:
        self.root, self.host = root, socket.gethostname().partition(".")[0]
        self.node_name = ""
        self.env = os.environ | {
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        self._sql: subprocess.Popen[bytes] | None = None
        self.limits_memory = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()

    def start(self) -> None:
        """Boot; some ten seconds. Raises what goes wrong, with everything stopped again."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        for name in ("munge", "state", "spool", "log", "dev", "sql"):
            (self.root / name).mkdir(parents=True)
        names = ("ctld", "slurmd", "dbd", "sql")
        told = dict(zip(names, _free_ports(len(names)), strict=True)) | {"root": self.root, "host": self.host}
        # Slurm names control groups after node and job: two clusters on one machine must differ in the first.
        self.node_name = f"n{told['slurmd']}"
        told |= {"node": self.node_name, "cpus": CPUS, "memory": MEMORY_MB, "gpus": GPUS}
        told |= {"task": "task/cgroup" if self.limits_memory else "task/none"}
        self._munge()
        for number in range(GPUS):  # Slurm wants character devices whose names end in a number
            os.mknod(self.root / "dev" / f"gpu{number}", 0o666 | stat.S_IFCHR, NULL)
        device = f"File={self.root}/dev/gpu[0-{GPUS - 1}]"
        self._write("gres.conf", f"NodeName={self.node_name} Name=gpu {device}\n")
        constrain = "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n" if self.limits_memory else ""
        self._write("cgroup.conf", f"CgroupAutomount=no\n{constrain}")
        self._write("slurm.conf", SLURM_CONF.format(**told))
        self._write("slurmdbd.conf", SLURMDBD_CONF.format(**told)).chmod(0o600)
        self._database(int(told["sql"]))
        self.run("slurmdbd")
        _until(lambda: self.answers("sacctmgr", "-n", "list", "cluster"), "slurmdbd")
        self.run("sacctmgr", "-i", "add", "cluster", "test")
        self.controller()
        self.node()
        _until(lambda: "idle" in self.answers("sinfo", "-h", "-o", "%T").split(), "an idle node")

    def _munge(self) -> None:
        place = self.root / "munge"
        key = place / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        place.chmod(0o755)
        files = [
            f"--{name}={place}/{file}" for name, file in (("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"))
        ]
        self.run("munged", "--force", *files, f"--key-file={key}", f"--seed-file={place}/seed")

    def _database(self, port: int) -> None:
        data, sock = self.root / "sql" / "data", self.root / "sql" / "sock"
        usual = ("--no-defaults", "--user=root", f"--datadir={data}")
        self.run("mariadb-install-db", *usual, "--auth-root-authentication-method=normal", "--skip-test-db")
        with open(self.root / "log" / "mariadb.log", "ab") as log:
            self._sql = subprocess.Popen(
                [
                    *("mariadbd", *usual, f"--socket={sock}", f"--port={port}", "--bind-address=127.0.0.1"),
                    *("--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0", "--skip-log-bin"),
                ],
                stdout=log,
                stderr=log,
                env=self.env,
            )
        client = ("--no-defaults", f"--socket={sock}", "-u", "root")
        _until(lambda: self.answers("mariadb-admin", *client, "ping"), "MariaDB")
        users = [f"'slurm'@'{host}'" for host in ("127.0.0.1", "localhost")]
        words = [f"CREATE USER {u} IDENTIFIED BY 'slurm'; GRANT ALL ON slurm_acct_db.* TO {u};" for u in users]
        self.run("mariadb", *client, "-e", f"CREATE DATABASE slurm_acct_db; {' '.join(words)}")

    def controller(self) -> None:
        """Start slurmctld."""
        self.run("slurmctld")

    def node(self) -> None:
        """Start slurmd."""
        self.run("slurmd", "-N", self.node_name)

    def stop_controller(self) -> None:
        self._end(self.root / "slurmctld.pid", patience=15.0)  # it saves what it knows

    def stop(self) -> None:
        """Stop everything that was started, by process id."""
        with contextlib.suppress(Exception):
            jobs = self.answers("squeue", "-h", "-o", "%A").split()
            if jobs:
                self.answers("scancel", "--signal=KILL", *jobs)
                _until(lambda: not self.answers("squeue", "-h", "-t", "R,CG", "-o", "%A").split(), "no job", 10)
        for name in ("slurmd.pid", "slurmctld.pid", "slurmdbd.pid"):
            self._end(self.root / name)
        if self._sql is not None:
            self._sql.terminate()
            self._sql.wait(30)
        self._end(self.root / "munge" / "pid")
        for group, _, _ in os.walk(f"/sys/fs/cgroup/memory/slurm_{self.node_name}", topdown=False):
            with contextlib.suppress(OSError):  # slurmd leaves them, empty
                os.rmdir(group)

    def run(self, *words: str) -> str:
        """Run a command of this cluster; returns what it printed. Raises CalledProcessError with its words."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def answers(self, *words: str) -> str:
        """What a command printed; empty if it failed or took too long."""
        try:
            done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=10)
        except subprocess.TimeoutExpired:
            return ""
        return (done.stdout or " ") if done.returncode == 0 else ""

    def _write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.write_text(text)
        return path

    def _end(self, pid_file: Path, patience: float = 1.0) -> None:
        try:
            pid = int(pid_file.read_text())
            os.kill(pid, signal.SIGTERM)
        except (OSError, ValueError):
            return
        for _ in range(int(20 * patience)):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {seconds:g} s")
        time.sleep(0.1)
