"""The report of a sweep as a reader has it: the page, Markdown and CSV, and the command that writes them."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fakes.command import sweeper
from hypothesis import given
from hypothesis import strategies as st
from made_up import BEGAN, events, proof, write_run
from markdown_it import MarkdownIt

from sweeper.analysis.sentences import sentences
from sweeper.report import __main__ as command
from sweeper.report import charts, page, table
from sweeper.report.story import gather

FAILURE = {
    "t": BEGAN + 30,
    "event": "failure",
    "type": "RuntimeError",
    "message": "Detected that you are using FX to symbolically trace a dynamo-optimized function.",
    "traceback": "Traceback (most recent call last):\n  the traceback's own line\nRuntimeError: Detected that you are "
    "using FX to symbolically trace a dynamo-optimized function.",
    "worker": "drafter-1",
    "stacks": "Thread drafter-0:\n  a frame of a stack",
}
NASTY = "<script>alert('log')</script> & ``` \x1b[31m |"


def planned(store: Path, folders: list[Path], **plan: Any) -> Path:
    """A sweep that planned these runs; returns its folder."""
    runs = []
    for number, folder in enumerate(folders):
        run = json.loads((folder / "run.json").read_text())
        run["identity"] = f"{number:064}"
        (folder / "run.json").write_text(json.dumps(run))
        runs.append({"cell": run["cell"], "identity": run["identity"], "repeat": run["repeat"]})
    sweep = store / "sweeps" / plan.get("sweep", "abc123abc123")
    sweep.mkdir(parents=True)
    given = {
        "sweep": sweep.name,
        "title": "compile=locked,whole",
        "command": ["-m", "cache=cold,warm"],
        "written": BEGAN,
    }
    (sweep / "plan.json").write_text(json.dumps(given | {"runs": runs} | plan))
    return sweep


def grid(store: Path) -> Path:
    """Two strategies, cold and warm, three repeats; `unlocked` fails when cold, and one of its runs hangs."""
    folders = []
    for compile, pace in (("locked", 1.0), ("whole", 0.5), ("unlocked", 1.0)):
        for cache in ("cold", "warm"):
            for repeat in (1, 2, 3):
                cell = {"wheel": "current", "compile": compile, "cache": cache}
                told, how = events(pace=pace * (1 + 0.01 * repeat)), {"cache": proof(cache)}
                if cache == "warm":
                    told = [e | {"t": e["t"] - 15 * (e["event"] != "start")} for e in told]
                if compile == "unlocked" and cache == "cold":
                    told, how = [*told[:6], FAILURE], {"exit_code": 1}
                if compile == "unlocked" and repeat == 3 and cache == "warm":
                    told, how = told[:2], {"exit_code": None, "signal": 9, "ended_by": "hung", "hung_stage": "train"}
                folder = write_run(store, cell, repeat=repeat, told=told, **how)
                uses = [{"t": BEGAN + 2 * n, "rss_bytes": n * 10**9, "cpu": 1.5} for n in range(1, 8)]
                (folder / "usage.jsonl").write_text("".join(json.dumps(use) + "\n" for use in uses))
                folders.append(folder)
    for folder in folders:
        if "unlocked" in folder.name:
            (folder / "child.log").write_text("".join(f"{NASTY} line {n} of {folder.name}\n" for n in range(200)))
            (folder / "stacks.txt").write_text("Thread 0x7f:\n  the stack <of> a hang\n")
    return planned(store, folders)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = grid(tmp_path_factory.mktemp("report") / "store")
    page.write(folder)
    return folder


class Seen(HTMLParser):
    """What a page holds: its elements by name with their texts, and every address that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        self.texts.setdefault(tag, []).append("")
        if tag not in ("meta", "link", "input", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data


def test_the_page_says_what_the_analysis_and_the_table_say(sweep: Path) -> None:
    story, seen = gather(sweep), Seen((sweep / page.HTML).read_text())
    text = " ".join(" ".join(seen.texts["section"]).split())
    assert "compile.fx_trace_race" in sentences(story.conclusion)
    for line in sentences(story.conclusion).splitlines():
        assert " ".join(line.split()) in text
    heads, lines = table.texts(story.rows)
    assert [head.strip() for head in seen.texts["th"]] == heads
    assert [cell.strip() for cell in seen.texts["td"]] == [cell for line in lines for cell in line]
    speeds = {f"{row['ktok_s']['median']:.3f}" for row in story.rows if row["ktok_s"]}
    assert len(speeds) == 3
    drawn = {found.strip() for found in seen.texts["text"]}
    assert speeds <= drawn, "each cell of the heat map shows its median"
    (failed,) = (row for row in story.rows if "failed" in row["verdicts"])
    assert f"{failed['label']}\n3 failed\ncompile.fx_trace_race (3 runs)" in seen.texts["title"]


def test_each_failed_cell_has_signature_remedy_stacks_and_the_end_of_its_log(sweep: Path) -> None:
    story = gather(sweep)
    assert [(f.verdict, f.cause, f.repeats, f.of) for f in story.failures] == [
        ("failed", "compile.fx_trace_race", [1, 2, 3], 3),
        ("hung", "process.hung", [3], 3),
    ]
    articles = Seen((sweep / page.HTML).read_text()).texts["article"]
    assert len(articles) == 2
    for failure, article in zip(story.failures, articles, strict=True):
        assert failure.fingerprint in article
        assert failure.remedy in article
        assert f"{len(failure.repeats)} of 3 runs" in article
        assert "the stack <of> a hang" in article or "as above" in article
        assert "line 199" in article
        assert "line 139" not in article, "the last sixty lines"
    assert "the traceback's own line" in articles[0]


def test_what_a_log_holds_is_text(sweep: Path) -> None:
    text = (sweep / page.HTML).read_text()
    seen = Seen(text)
    assert len(seen.texts["script"]) == 1, "the page's own"
    assert "alert" not in seen.texts["script"][0]
    assert "<script>alert('log')</script> & ``` [31m | line 199" in " ".join(seen.texts["pre"])
    assert "\x1b" not in text
    markdown = (sweep / page.MARKDOWN).read_text()
    fenced = re.findall(r"^(`{3,})\n(.*?)\n\1$", markdown, flags=re.M | re.S)
    assert any(fence == "````" and NASTY.split("\x1b")[0] in body for fence, body in fenced)


def test_the_page_needs_nothing_from_elsewhere(sweep: Path) -> None:
    seen = Seen((sweep / page.HTML).read_text())
    assert seen.addresses
    assert all(address.startswith(("#", "data:")) for address in seen.addresses)
    names = re.findall(r'\bid="([^"]+)"', re.sub(r"<defs>.*?</defs>", "", (sweep / page.HTML).read_text(), flags=re.S))
    assert len(names) == len(set(names)), "an id is there once"


def test_the_csv_has_every_run_with_its_figures(sweep: Path) -> None:
    with open(sweep / page.CSV, newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 18
    for row in found:
        folder = sweep.parent.parent / "runs" / row["folder"]
        verdict, run = (json.loads((folder / f"{name}.json").read_text()) for name in ("verdict", "run"))
        assert {factor: row[factor] for factor in run["cell"]} == run["cell"]
        assert (row["verdict"], int(row["repeat"])) == (verdict["verdict"], run["repeat"])
        assert row["cause"] == (verdict["signature"] or {}).get("cause", "")
        ktok_s = verdict["figures"]["ktok_s"]
        assert float(row["ktok_s"]) == ktok_s if ktok_s is not None else row["ktok_s"] == ""


def test_the_markdown_renders_as_one_table_with_the_conclusion(sweep: Path) -> None:
    rendered = MarkdownIt("commonmark").enable("table").render((sweep / page.MARKDOWN).read_text())
    seen = Seen(rendered)
    heads, lines = table.texts(gather(sweep).rows)
    assert [head.strip() for head in seen.texts["th"]] == heads
    assert len(seen.texts["td"]) == len(lines) * len(heads)
    assert any(text.startswith("compile.fx_trace_race: 3 of") for text in seen.texts["li"])
    assert any("line 199" in text for text in seen.texts["code"])
    assert "script" not in seen.texts


def test_runs_are_linked_where_mlflow_shows_them(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, {"compile": level}) for level in ("locked", "whole")]
    sweep = planned(tmp_path, folders)
    for number, folder in enumerate(folders):
        told = {"run_id": f"id{number}", "ui": "http://tracking.example", "experiment": "7"}
        (folder / "tracking.json").write_text(json.dumps(told))
    addresses = Seen(page.html(gather(sweep))).addresses
    assert {"http://tracking.example/#/runs/id0", "http://tracking.example/#/runs/id1"} <= set(addresses)
    (compare,) = (address for address in addresses if "compare-runs" in address)
    assert compare.endswith("?runs=%5B%22id0%22%2C%20%22id1%22%5D&experiments=%5B%227%22%5D")


def test_runs_that_left_next_to_nothing_are_still_told(tmp_path: Path) -> None:
    one = write_run(tmp_path, {"compile": "locked"}, told=[], ended_by="skipped", reason="needs a GPU", cache=None)
    two = write_run(tmp_path, {"compile": "whole"}, told=[], exit_code=3, cache=None)
    for name in ("events.jsonl", "child.log", "spec.json"):
        (two / name).unlink()
    three = write_run(tmp_path, {"compile": "eager"}, finished=False)
    story, files = page.write(planned(tmp_path, [one, two, three]))
    assert story.unfinished == 1
    assert story.skipped == {"needs a GPU": ["compile=locked"]}
    text = files[0].read_text()
    assert "1 not run" in text
    assert "needs a GPU" in text
    assert "Timelines" not in text
    assert all(path.stat().st_size for path in files)


def test_profiles_that_runs_left_are_named_and_a_cells_first_is_quoted(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, {"compile": "locked"}, repeat=repeat) for repeat in (1, 2, 3)]
    folders.append(write_run(tmp_path, {"compile": "whole"}))
    for number, folder in enumerate(folders[1:], 2):
        (folder / "profile.json.gz").write_bytes(b"\x1f\x8b")
        (folder / "profile.txt").write_text(f"<b> table {number} \x1b\n" + "a line of a long table\n" * 9000)
    _, (html, markdown, _) = page.write(planned(tmp_path, folders))
    seen = Seen(html.read_text())
    (section,) = (text for text in seen.texts["section"] if "Profiles" in text)
    assert f"runs/{folders[0].name}" not in section
    for folder in folders[1:]:
        assert f"runs/{folder.name}: profile.json.gz, profile.txt" in section
    assert [re.findall(r"<b> table \d", text) for text in seen.texts["pre"] if "table" in text] == [
        ["<b> table 2"],
        ["<b> table 4"],
    ]
    assert html.stat().st_size < 200_000
    listed = Seen(MarkdownIt("commonmark").enable("table").render(markdown.read_text())).texts["li"]
    assert any(folders[3].name in text and "profile.json.gz, profile.txt" in text for text in listed)


def test_levels_that_are_no_plain_words_are_drawn_as_they_are(tmp_path: Path) -> None:
    odd = ["$\\frac", "<b>&amp;", "a\x1bb", "'{python}' -c \"x\" " + "long" * 30]
    folders = []
    for number, level in enumerate(odd):
        told = [*events()[:2], FAILURE | {"message": "half a surrogate: \ud800"}] if number == 1 else events()
        folders.append(write_run(tmp_path, {"args.what": str(number), "cache": "cold"}, told=told))
        run = json.loads((folders[-1] / "run.json").read_text())
        (folders[-1] / "run.json").write_text(json.dumps(run | {"cell": {"args.what": level, "cache": "cold"}}))
    _, (html, markdown, _) = page.write(planned(tmp_path, folders))
    seen = Seen(html.read_text())
    assert {"$\\frac", "<b>&amp;", "ab"} <= {text.strip() for text in seen.texts["text"]}
    assert "b" not in seen.texts
    rendered = Seen(MarkdownIt("commonmark").enable("table").render(markdown.read_text()))
    assert {"$\\frac", "<b>&amp;"} <= set(rendered.texts["td"])
    assert not {"b", "em"} & set(rendered.texts)


def test_two_hundred_cells_make_a_page_that_opens_at_once(tmp_path: Path) -> None:
    folders = []
    for wheel in range(5):
        for compile in ("locked", "whole", "unlocked", "eager", "suppressed"):
            for split in ("1t1d", "2t2d", "5t3d", "6t2d"):
                for cache in ("cold", "warm"):
                    cell = {"wheel": f"w{wheel}", "compile": compile, "split": split, "cache": cache}
                    bad = compile == "unlocked" and wheel < 3
                    told = (
                        [*events()[:3], FAILURE] if bad else events(steps=4, steady_after=1, pace=1 + len(folders) % 7)
                    )
                    folders.append(write_run(tmp_path, cell, told=told, exit_code=1 if bad else 0, cache=proof(cache)))
                    if bad:
                        lines = (f"{len(folders)}: line {n}, as long as lines of a log are\n" for n in range(5000))
                        (folders[-1] / "child.log").write_text("".join(lines))
    _, (html, markdown, _) = page.write(planned(tmp_path, folders))
    assert html.stat().st_size < 3_000_000
    assert markdown.stat().st_size < 1_000_000
    seen = Seen(html.read_text())
    assert len(seen.texts["article"]) == 24
    cells = [found for found in seen.texts["title"] if re.match(r"wheel=w\d compile=\w+ split=\w+ cache=\w+\n", found)]
    assert len(set(cells)) == 200, "each cell is in the heat map"


LEVELS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["1", "2", "30", "x"]), min_size=1)


@given(st.lists(LEVELS, min_size=2, max_size=30, unique_by=lambda cell: tuple(sorted(cell.items()))))
def test_the_heat_map_has_each_cell_once(cells: list[dict[str, str]]) -> None:
    rows = [{"cell": cell, "label": str(cell), "ktok_s": None} for cell in cells]
    names = sorted({name for cell in cells for name in cell})
    factors = {name: sorted({cell.get(name, "-") for cell in cells}) for name in names}
    factors = {name: levels for name, levels in factors.items() if len(levels) > 1}
    shown = [row["label"] for panel in charts.panels(rows, factors) for row in panel.cells.values()]
    assert sorted(shown) == sorted(row["label"] for row in rows)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=400), st.integers(8, 60))
def test_thinned_timelines_keep_their_peaks(values: list[float], most: int) -> None:
    series = [(float(t), value) for t, value in enumerate(values)]
    kept = charts._thinned(series, most)
    assert len(kept) <= max(most, 2) + 2
    assert set(kept) <= set(series)
    assert kept == sorted(kept)
    assert max(value for _, value in kept) == max(values)
    assert math.isclose(min(value for _, value in kept), min(values))


def test_the_command_writes_the_newest_sweep_or_the_one_that_is_named(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = sweep.parent.parent
    assert command.main(["--store", str(store), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "compile.fx_trace_race: 3 of" in printed.out
    assert str(tmp_path / "out" / page.HTML) in printed.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(page.FILES)
    assert command._folder("abc", store) == sweep
    assert command._folder(str(sweep), Path("elsewhere")) == sweep


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--store", "nowhere"], "store=nowhere: must be a store in which a sweep has run"),
        (["nine", "--store", "{store}"], "sweep=nine: must be a sweep's folder or one of the store's (abc123abc123)"),
        (["{broken}"], "sweep={broken}: its plan.json must be one that a sweep wrote"),
        (["abc", "--store", "{store}", "--out", "{file}"], "out={file}: the report cannot be written (File exists)"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    broken, file = tmp_path / "store" / "sweeps" / "broken", tmp_path / "file"
    broken.mkdir(parents=True)
    (broken / "plan.json").write_text("[]")
    file.write_text("")
    places = {"store": sweep.parent.parent, "broken": broken, "file": file}
    assert command.main([word.format(**places) for word in words]) == 2
    assert capsys.readouterr().err == said.format(**places) + "\n"


def test_a_sweep_that_is_resumed_for_nothing_leaves_its_report_alone(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, {"compile": level}) for level in ("locked", "whole")]
    sweep = planned(tmp_path, folders)
    assert page.kept(sweep) == f"report: {sweep / page.HTML}"
    files = [sweep / name for name in page.FILES]
    for file in files:
        os.utime(file, (4e9, 4e9))
    assert page.kept(sweep) == f"report: {sweep / page.HTML}"
    assert all(file.stat().st_mtime == 4e9 for file in files)
    os.utime(folders[1] / "verdict.json", (5e9, 5e9))
    page.kept(sweep)
    assert all(file.stat().st_mtime < 4e9 for file in files), "a run ended since"


def test_a_report_that_fails_is_told_and_harms_nothing(tmp_path: Path) -> None:
    told = page.kept(tmp_path)
    assert told.startswith("the report could not be written (FileNotFoundError")
    assert f"python -m sweeper.report {tmp_path}" in told


def test_a_sweep_ends_with_its_report_and_any_command_has_its_memory_in_it(tmp_path: Path) -> None:
    waits = "workload.argv=['{python}','-c','import time; held = bytearray(200 << 20); time.sleep(3)']"
    done = sweeper(tmp_path / "store", "workload=command", waits, "report=true")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "store" / "sweeps").iterdir()
    assert f"report: {folder / page.HTML}" in done.stderr
    assert all((folder / name).stat().st_size for name in page.FILES)
    (run,) = gather(folder).runs
    assert max(gigabytes for _, gigabytes in run.timeline.memory) > 0.2
    assert run.timeline.busy


# Clicks on what can be clicked, and tells in the page what came of it.
CLICKS = """<script>
const told = {};
document.querySelector("#theme").click();
told.light = getComputedStyle(document.body).backgroundColor;
document.querySelector("#theme").click();
told.dark = getComputedStyle(document.body).backgroundColor;
const rows = () => [...document.querySelectorAll("#table tbody tr")];
const speeds = () => rows().map((row) => row.querySelector(".number").dataset.key);
const head = [...document.querySelectorAll("#table th button")].find((one) => one.textContent === "Ktok/s");
head.click(); told.up = speeds();
head.click(); told.down = speeds();
const fold = document.querySelector("details");
told.folded = !fold.open;
fold.querySelector("summary").click();
setTimeout(() => {
  told.unfolded = fold.open;
  told.requested = performance.getEntriesByType("resource").map((one) => one.name);
  told.width = document.documentElement.scrollWidth - innerWidth;
  document.body.insertAdjacentHTML("beforeend", `<output>${JSON.stringify(told)}</output>`);
}, 50);
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_a_browser_opens_it_without_errors_or_requests_and_its_buttons_work(sweep: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown.html"
    shown.write_text((sweep / page.HTML).read_text().replace("</body>", CLICKS + "</body>"))
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"),
        "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own errands come to nothing
        *("--window-size=1000,800", "--virtual-time-budget=2000", "--dump-dom", shown.as_uri()),
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(["chromium", *flags], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    told = json.loads(Seen(done.stdout).texts["output"][0])
    assert (told["light"], told["dark"]) == ("rgb(255, 255, 255)", "rgb(20, 24, 29)")
    numbers = [float(key) for key in told["up"] if key != "-"]
    assert numbers == sorted(numbers)
    assert [key for key in told["down"] if key != "-"] == [key for key in reversed(told["up"]) if key != "-"]
    assert [url for url in told["requested"] if not url.startswith("data:")] == []
    assert told["folded"]
    assert told["unfolded"]
    assert told["width"] <= 0, "nothing is wider than the window"
