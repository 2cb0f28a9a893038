"""A sweep's report as files: one HTML page that needs nothing else, Markdown, and a CSV with a line a run."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

from sweeper import store
from sweeper.measure import finite
from sweeper.report import table
from sweeper.report.story import Story, Told, gather

HTML, MARKDOWN, CSV = FILES = ("report.html", "report.md", "report.csv")
COMMAND = "python -m sweeper"
LOG_LINES = 15  # of a failure in Markdown
FIGURES = ("ktok_s", "steady_steps", "steady_seconds", "steps", "tokens", "time_to_first_step_s", "compile_s")
PEAKS = ("peak_rss_bytes", "peak_gpu_bytes", "targets_waited", "drafters_waited", "loss_last", "accept_last")


def write(folder: Path, stopped: str = "", out: Path | None = None) -> tuple[Story, list[Path]]:
    """Write the three files of the sweep in `folder` (into `out`, by default the same folder).

    `stopped` says why no more blocks were run. Raises OSError when a file cannot be written, and what `gather` raises
    on a bad plan.json.
    """
    story, place = gather(folder, stopped), out or folder
    place.mkdir(parents=True, exist_ok=True)
    made = {HTML: html(story), MARKDOWN: markdown(story), CSV: as_csv(story)}
    for name, text in made.items():
        store.write(place / name, text.encode("utf-8", "replace").decode())  # half a surrogate is no text
    return story, [place / name for name in made]


def kept(folder: Path, stopped: str = "") -> str:
    """See to the files at the end of a sweep; says where they are. A view that fails is told: the runs are whole."""
    try:
        if not _fresh(folder):
            write(folder, stopped)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return f"the report could not be written ({told}); python -m sweeper.report {folder} tries again"
    return f"report: {folder / HTML}"


def _fresh(folder: Path) -> bool:
    """Whether the files tell all there is: each planned run is over, and was when they were written."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    written = min((folder / name).stat().st_mtime for name in FILES)
    over, planned = store.planned(folder), (store.read_json(folder / "plan.json") or {})["runs"]
    ends = [(one.folder / store.VERDICT_FILE).stat().st_mtime for one in over]
    return len(ends) == len({one["identity"] for one in planned}) and max(ends, default=written) < written


def html(story: Story) -> str:
    """The page: all styles, scripts and charts inside."""
    from sweeper.report import charts

    heads, lines = table.texts(story.rows)
    with charts.style():
        drawn = {
            "heat": charts.heat(story),
            "strips": charts.strips(story),
            "first_steps": charts.first_steps(story),
            "verdicts": charts.verdicts(story),
            "timelines": charts.timelines(story),
        }
    causes = Counter((failure.cause or failure.verdict) for failure in story.failures for _ in failure.repeats)
    return str(
        _environment()
        .get_template("page.html.j2")
        .render(
            story=story,
            charts=drawn,
            heads=heads,
            lines=zip(story.rows, lines, strict=True),
            figures=table.FIGURES,
            remarks=table.remarks(story.rows),
            said=paragraphs(story.said),
            causes=causes.most_common(),
            order=[v for v in charts.VERDICTS if v in story.verdicts],
            links={row["label"]: _of_row(row, story.runs) for row in story.rows},
        )
    )


def markdown(story: Story) -> str:
    """The same without pictures, to paste into an issue."""
    heads, lines = table.texts(story.rows)
    return str(
        _environment()
        .get_template("page.md.j2")
        .render(
            story=story,
            heads=heads,
            lines=lines,
            remarks=table.remarks(story.rows),
            said=paragraphs(story.said),
            log_lines=LOG_LINES,
        )
    )


def as_csv(story: Story) -> str:
    """A line a run: its levels, verdict and figures as numbers, empty where unknown."""
    factors = list(dict.fromkeys(factor for told in story.runs for factor in told.attempt.run.get("cell") or {}))
    own = (
        "repeat",
        "attempt",
        "verdict",
        "cause",
        "fingerprint",
        "cache_proved",
        *FIGURES,
        *PEAKS,
        "wall_s",
        "started",
    )
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow([*factors, *own, "folder", "reason"])
    for told in story.runs:
        verdict, run = told.attempt.verdict or {}, told.attempt.run
        signature, measured = verdict.get("signature") or {}, verdict.get("figures") or {}
        cell = run.get("cell") or {}
        numbers = [measured.get(name) for name in (*FIGURES, *PEAKS)] + [verdict.get("wall_s"), run.get("started")]
        words = [told.repeat, told.attempt.number, told.verdict, told.attempt.cause, signature.get("fingerprint")]
        levels = [cell.get(factor, "") for factor in factors]
        plain = ["" if finite(number) is None else number for number in numbers]
        reason = " ".join(str(verdict.get("reason") or "").split())
        rows.writerow([*levels, *words, told.proved, *plain, told.attempt.folder.name, reason])
    return out.getvalue()


def paragraphs(said: str) -> list[tuple[int, str, bool]]:
    """A conclusion as (depth, text, whether it is a command to paste)."""
    found = []
    for line in said.splitlines():
        if text := line.strip():
            found.append(((len(line) - len(line.lstrip())) // 2, text, text.startswith(COMMAND)))
    return found


def _of_row(row: dict[str, Any], runs: list[Told]) -> list[tuple[str, str]]:
    """Repeats of a cell and where MLflow shows them."""
    names = set(row["runs"])
    return [(f"r{run.repeat}", run.link) for run in runs if run.attempt.folder.name in names and run.link]


def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    made = Environment(
        loader=PackageLoader("sweeper.report", "templates"),
        autoescape=select_autoescape(enabled_extensions=("html.j2",), default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"prose": _prose, "fenced": _fenced, "key": _key}
    return made


def _prose(text: str) -> str:
    """A text as one line of Markdown that means what it says, also as a cell of a table."""
    return re.sub(r"([\\`*<\[|&])", r"\\\1", " ".join(text.split())) or " "


def _fenced(text: str) -> str:
    """A text as a block of code, whatever backticks it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _key(text: str) -> str | float:
    """What a column is sorted by: the number that a text begins with, else the text."""
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else text
