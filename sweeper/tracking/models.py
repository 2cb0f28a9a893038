"""The drafters that a run saved, as models in MLflow: safetensors and a configuration, nothing that is executed.

One LoggedModel a drafter, several with a fanout. It names the run that made it and holds the run's last figures, so
that the UI's Models tab compares drafters by them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeper.store import SPEC_FILE, read_json

DRAFTER = "drafter"  # in a run's directory; with a fanout a folder for each variant is in it
CONFIG, WEIGHTS = "config.json", "*.safetensors"
DESCRIBED = {"layers": "num_hidden_layers", "hidden": "hidden_size", "block": "block_size"}  # in config.json


def saved(folder: Path) -> dict[str, Path]:
    """The folders of the drafters that a run saved whole, by variant; "" without a fanout."""
    places = {"": folder / DRAFTER} | {path.name: path for path in sorted((folder / DRAFTER).glob("*/"))}
    return {name: place for name, place in places.items() if (place / CONFIG).is_file() and any(place.glob(WEIGHTS))}


def log(
    client: Any, experiment: str, run_id: str, folder: Path, metrics: list[Any], known: Mapping[str, str]
) -> dict[str, str]:
    """Log the run's drafters that are not in `known`; returns the model ids by variant, `known` included.

    `metrics` of the run become the model's, those of another variant left out. Raises what MLflow raises.
    """
    found = dict(known)
    for variant, drafter in saved(folder).items():
        if variant not in found:
            found[variant] = _log(client, experiment, run_id, folder, variant, drafter, metrics)
    return found


def _log(
    client: Any, experiment: str, run_id: str, folder: Path, variant: str, drafter: Path, metrics: list[Any]
) -> str:
    from mlflow.entities import LoggedModelOutput, Metric
    from mlflow.models import Model

    mark = f"{run_id}/{variant}"
    begun = client.search_logged_models([experiment], f"tags.`sweeper.model` = '{mark}'")
    if begun:
        made = begun[0]
    else:
        spec, config = read_json(folder / SPEC_FILE) or {}, read_json(drafter / CONFIG) or {}
        params = {"target": (spec.get("target") or {}).get("model"), "variant": variant or None}
        params |= {name: config.get(key) for name, key in DESCRIBED.items()}
        made = client.create_logged_model(
            experiment,
            name=f"{DRAFTER}-{variant}" if variant else DRAFTER,
            source_run_id=run_id,
            tags={"sweeper.model": mark, "sweeper.run": folder.name},
            params={name: str(value) for name, value in params.items() if value is not None},
            model_type=DRAFTER,
        )
    with tempfile.TemporaryDirectory(prefix="sweeper-") as scratch:
        described = Path(scratch, "MLmodel")
        Model(run_id=run_id, model_id=made.model_id, flavors={"dflash": {"weights": "safetensors"}}).save(described)
        client.log_model_artifact(made.model_id, str(described))
    client.log_model_artifacts(made.model_id, str(drafter))
    own = [one for one in metrics if "/" not in one.key or not variant or one.key.endswith(f"/{variant}")]
    told = [Metric(one.key, one.value, one.timestamp, one.step, model_id=made.model_id) for one in own]
    client.log_batch(run_id, metrics=told)
    outputs = client.get_run(run_id).outputs
    if made.model_id not in [one.model_id for one in (outputs.model_outputs if outputs else ())]:
        client.log_outputs(run_id, [LoggedModelOutput(made.model_id, max((one.step for one in own), default=0))])
    client.finalize_logged_model(made.model_id, "READY")
    return str(made.model_id)
