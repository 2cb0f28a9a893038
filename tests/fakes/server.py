"""A tracking server that others share: MLflow on PostgreSQL, both started and stopped here, on loopback."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What MLflow's database keeps of runs, by table.
COLUMNS = {
    "runs": "run_uuid, name, status, start_time, end_time",
    "params": "run_uuid, key, value",
    "tags": "run_uuid, key, value",
    "metrics": "run_uuid, key, step, timestamp, value, is_nan",
}


def missing() -> str:
    """Why there can be no such server here; empty if there can."""
    if importlib.util.find_spec("psycopg2") is None:
        return "the driver psycopg2 is not installed"
    if not _programs():
        return "PostgreSQL is not installed"
    if os.getuid() == 0 and not any(one.pw_name == "postgres" for one in pwd.getpwall()):
        return "PostgreSQL does not run as root, and there is no user postgres"
    return ""


def _programs() -> list[Path]:
    """The folders of PostgreSQL's programs, the newest version last."""
    found = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return [path.parent for path in sorted(found, key=lambda path: int(path.parts[-3]))]


class Server:
    """PostgreSQL and, on it, an MLflow server. `kill` ends the server as a lost machine does."""

    def __init__(self, folder: Path) -> None:
        self.port, self.database = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._postgres = folder, _programs()[-1]
        self._as = {"user": "postgres"} if os.getuid() == 0 else {}
        self._server: subprocess.Popen[bytes] | None = None
        self._base: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        data = self._folder / "base"
        if self._as:
            shutil.chown(self._folder, "postgres")
        make = [self._postgres / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(make, check=True, capture_output=True, cwd="/", **self._as)
        self.start_database()
        self.start()
        return self

    def start_database(self) -> None:
        """Start PostgreSQL and wait until it takes connections."""
        data = self._folder / "base"
        serve = [self._postgres / "postgres", "-D", data, "-p", str(self.database), "-k", data, "-h", "127.0.0.1"]
        quick = ["-c", "fsync=off", "-c", "full_page_writes=off"]
        with open(self._folder / "base.log", "ab") as log:
            self._base = subprocess.Popen([*serve, *quick], stdout=log, stderr=log, cwd="/", **self._as)
        wait_for(lambda: answers(self.database))

    def start(self) -> None:
        """Start the MLflow server and wait until it answers."""
        base = f"postgresql+psycopg2://postgres@127.0.0.1:{self.database}/postgres"
        words = ["--backend-store-uri", base, "--artifacts-destination", str(self._folder / "artifacts")]
        argv = [sys.executable, "-m", "mlflow", "server", *words, "--port", str(self.port), "--workers", "1"]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self._folder / "server.log", "ab") as log:
            self._server = subprocess.Popen(
                argv, stdout=log, stderr=log, env=os.environ | quiet, start_new_session=True
            )
        wait_for(self.healthy, 120)

    def healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def rows(self) -> dict[str, list[Any]]:
        """What the database holds of runs, in full."""
        import psycopg2

        base = psycopg2.connect(host="127.0.0.1", port=self.database, user="postgres", dbname="postgres")
        with contextlib.closing(base), base.cursor() as cursor:
            found = {}
            for name, wanted in COLUMNS.items():
                cursor.execute(f"SELECT {wanted} FROM {name} ORDER BY {wanted}")
                found[name] = cursor.fetchall()
        return found

    def kill(self) -> None:
        if self._server:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None

    def kill_database(self) -> None:
        """End PostgreSQL at once; it recovers when it is started again."""
        if self._base:
            self._base.send_signal(signal.SIGQUIT)
            self._base.wait()
            self._base = None

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.kill_database()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def wait_for(true: Callable[[], bool], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "did not happen in time"
        time.sleep(0.05)
