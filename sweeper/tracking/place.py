"""Where a sweep is tracked: an MLflow store of its own, a server, or a database; which of these the setting means."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash.settings import SettingError

SERVER = ("http", "https")
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
REACH_S = 5.0
DATABASE_FILE = "mlflow.db"  # of the embedded store
DATABASE = ("postgresql", "mysql", "mssql", "sqlite")
EXAMPLE = "such as http://mlflow.example:5000"


@dataclass(frozen=True)
class Place:
    """An address that MLflow's client understands, and an experiment there. `own`: the store's embedded one."""

    uri: str
    experiment: str = "dflash"
    own: bool = False
    models: bool = True  # whether the drafters that runs saved are logged there

    @property
    def shown(self) -> str:
        """The address as it may be printed and kept: without its password."""
        return hidden(self.uri)

    @property
    def key(self) -> str:
        """Names the place (hex); a password given anew changes nothing."""
        return hashlib.sha256(f"{self.shown}\n{self.experiment}".encode()).hexdigest()[:16]

    @property
    def ui(self) -> str:
        """Where a browser finds it; what is in a database, where `mlflow ui` serves it."""
        return self.shown.rstrip("/") if urlsplit(self.uri).scheme in SERVER else "http://127.0.0.1:5000"


def own(store: Path, experiment: str = "dflash", models: bool = True) -> Place:
    """The embedded MLflow store: `mlflow.db` in the store, with `mlartifacts` beside it."""
    return Place(f"sqlite:///{store.resolve() / DATABASE_FILE}", experiment, own=True, models=models)


def read(config: Mapping[str, Any], store: Path) -> Place | None:
    """The place that the section `tracking` means, None for tracking=none. Raises SettingError; contacts nobody."""
    kind, uri, experiment = config.get("name"), config.get("uri"), config.get("experiment")
    models = config.get("models", True)
    if not isinstance(experiment, str) or not experiment:
        value = "null" if experiment is None else experiment
        raise SettingError("tracking.experiment", value, "must be a name, it may not be null")
    if not isinstance(models, bool):
        raise SettingError("tracking.models", models, "must be true or false")
    if kind == "server":
        check(uri)
        return Place(str(uri), experiment, models=models)
    if uri is not None:
        raise SettingError("tracking.uri", hidden(str(uri)), f"needs tracking=server, and this is tracking={kind}")
    return own(store, experiment, models) if kind == "local" else None


def reach(place: Place) -> None:
    """Raise OSError at once where nobody listens: MLflow's own tries take minutes. What is in a file is reached."""
    parts = urlsplit(place.uri)
    kind = parts.scheme.partition("+")[0]
    if parts.hostname and kind in PORTS:
        try:
            socket.create_connection((parts.hostname, parts.port or PORTS[kind]), REACH_S).close()
        except OSError as error:
            raise OSError(f"{place.shown} cannot be reached ({error})") from None


def check(uri: Any, setting: str = "tracking.uri") -> None:
    """Raise SettingError on an address that cannot be one of a server or of a database, or that holds a password which
    the environment can."""
    if not isinstance(uri, str) or "://" not in uri:
        value = "null" if uri is None else uri
        raise SettingError(setting, value, f"must be the address of an MLflow server, {EXAMPLE}")
    shown = hidden(uri)
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError as error:
        raise SettingError(setting, shown, f"must be an address, {EXAMPLE} ({error})") from None
    kind = parts.scheme.partition("+")[0]
    if kind not in SERVER + DATABASE:
        raise SettingError(setting, shown, f"must begin with one of {', '.join(f'{k}://' for k in SERVER + DATABASE)}")
    if kind in SERVER and (not parts.hostname or port == 0):
        raise SettingError(setting, shown, f"must name a host, {EXAMPLE}")
    if kind in SERVER and (parts.username or parts.password):
        how = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        raise SettingError(setting, shown, f"must hold no name and no password; set {how}")
    if kind in DATABASE:
        _check_driver(uri, setting)


def hidden(uri: str) -> str:
    """An address without its password."""
    return re.sub(r"(://[^/@\s:]*):[^/@\s]*@", r"\1@", uri)


def _check_driver(uri: str, setting: str) -> None:
    import sqlalchemy

    try:
        sqlalchemy.make_url(uri).get_dialect().import_dbapi()
    except ImportError as error:
        raise SettingError(setting, hidden(uri), f"needs a database driver that is not installed ({error})") from None
    except Exception as error:  # a dialect or an address that SQLAlchemy does not know
        raise SettingError(setting, hidden(uri), f"is no address of a database ({error})") from None
