"""Write a trained drafter in the format that a server or a trainer reads.

zlab is what z-lab's own code, SGLang and vLLM load, and what training leaves in RUN/drafter; speculators is the
format of vllm-project/speculators, which vLLM reads too. Both hold neither embedding nor head: those are the
target's, so a reader of speculators' format looks for the target under the name given by --verifier.

    python -m dflash export --run run --to my-drafter
    python -m dflash export --run run --to my-drafter --format speculators --verifier Qwen/Qwen3-8B
    python -m dflash export --run run --checkpoint --to halfway
    python -m dflash export --from downloaded-drafter --to other --format speculators --verifier Qwen/Qwen3-8B
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.card import read_facts
from dflash.geometry import Released, read_config
from dflash.settings import SettingError

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("zlab", "speculators")
Source = tuple[dict[str, Any], Mapping[str, "Tensor"], dict[str, Any]]  # z-lab's config, weights, facts


def arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", dest="trained", metavar="FOLDER", type=Path, help="output folder of a training run")
    source.add_argument(
        "--from", dest="drafter", metavar="FOLDER", type=Path, help="folder of a drafter in z-lab's format"
    )
    parser.add_argument("--to", metavar="FOLDER", type=Path, required=True, help="folder to write, new or empty")
    parser.add_argument("--format", choices=FORMATS, default="zlab", help="zlab (the default) or speculators")
    parser.add_argument("--variant", metavar="NAME", default="", help="the variant of a run with fanout")
    parser.add_argument("--checkpoint", action="store_true", help="the run's newest checkpoint, not its drafter")
    parser.add_argument(
        "--verifier", metavar="NAME", help="the target's name for those who read; default: what training was told"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.drafter is not None and (arguments.checkpoint or arguments.variant):
        raise SettingError("--from", arguments.drafter, "goes with neither --checkpoint nor --variant")
    if arguments.to.exists() and (not arguments.to.is_dir() or any(arguments.to.iterdir())):
        raise SettingError("--to", arguments.to, "must be a new or an empty folder")
    # Here and not above: a wrong argument is told without waiting for torch.
    from dflash import export
    from dflash.speculators import speculators_config

    if arguments.trained is None:
        config, weights, facts = _drafter(arguments.drafter, "--from")
    elif arguments.checkpoint:
        config, weights, facts = _checkpoint(arguments.trained, arguments.variant)
    else:
        config, weights, facts = _trained(arguments.trained, arguments.variant)
    if arguments.verifier:
        facts["target"] = arguments.verifier
    written = None
    if arguments.format == "speculators":
        if "target" not in facts:
            raise SettingError("--verifier", "none", "must name the target, this drafter does not say which it is for")
        written = speculators_config(config, facts["target"], facts.get("target_architectures", []))
    try:
        export.write(arguments.to, config, weights, facts, written)
    except OSError as error:
        raise SettingError("--to", arguments.to, f"must be a folder that can be written ({error})") from None
    print(f"{arguments.to}: {len(weights)} tensors in the format of {arguments.format}")
    return 0


def _drafter(folder: Path, setting: str) -> Source:
    from dflash.export import read_weights

    geometry = Released.read(folder, setting).geometry
    return read_config(folder, setting), read_weights(folder, geometry, setting), read_facts(folder)


def _trained(run: Path, variant: str) -> Source:
    folder = run / "drafter"
    if not variant and not (folder / "config.json").exists():
        if names := sorted(path.parent.name for path in folder.glob("*/config.json")):
            raise SettingError("--variant", "none", f"must be one of {', '.join(names)}, the drafters of {run}")
        raise SettingError("--run", run, "has no trained drafter; --checkpoint takes the newest checkpoint")
    return _drafter(folder / variant, "--variant" if variant else "--run")


def _checkpoint(run: Path, variant: str) -> Source:
    from dflash import checkpoint

    found, damaged = checkpoint.latest(run / "checkpoints" / variant)
    if found is None:
        raise SettingError("--checkpoint", run, f"has none that is whole{''.join('; ' + why for why in damaged)}")
    facts = dict(found.facts["facts"])
    return found.facts["config"], found.tensors("drafter"), facts | {"steps": found.step}
