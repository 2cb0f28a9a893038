"""A training command that knows nothing of the harness is run, read, measured and judged like any other."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.command import only, runs, sweeper
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.settings import SettingError
from sweeper import spec
from sweeper.__main__ import _hydras, _resolvers
from sweeper.composed import plain
from sweeper.help import CONF
from sweeper.progress import Printed, number
from sweeper.workload import fill, values

TRAINER = Path(__file__).parent / "fakes" / "trainer.py"
DOCS = Path(__file__).parent.parent / "docs" / "COMMAND.md"
PATTERN = r"step (?P<step>\d+)/(?P<steps>\d+): loss (?P<loss>\S+) \| (?P<tokens>\S+) tokens"
READ = f'workload.pattern="{PATTERN}"'


def command(*words: str) -> list[str]:
    quoted = ",".join(f"'{word}'" for word in ("{python}", str(TRAINER), *words))
    return ["workload=command", f"workload.argv=[{quoted}]"]


def events(store: Path, kind: str) -> list[dict[str, Any]]:
    (path,) = store.glob("runs/*/events.jsonl")
    return [event for line in path.read_text().splitlines() if (event := json.loads(line))["event"] == kind]


ENDINGS = {
    # way: verdict, cause ("" none, None any), steps
    "lines": ("ok", "", 8),
    "bar": ("ok", "", 8),
    "child": ("ok", "", 8),
    "shell": ("ok", "", 8),
    "flood": ("ok", "", 12),  # the second four of eight are new; the first four begin a new count
    "nan": ("degraded", "numerics.nan", 8),
    "swallowed": ("failed", "memory.gpu_oom", 8),
    "shrugged": ("ok", "", 8),
    "75": ("killed", "sweep.interrupted", 8),
    "143": ("killed", None, 8),
    "stuck": ("hung", "process.hung", 3),
}


def test_a_command_read_by_its_output_gets_steps_speed_and_the_right_verdict(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ways = f"args.way={','.join(ENDINGS)}"
    done = sweeper(store, "-m", *command("{args.way}"), ways, READ, "budget.train=1.5", "grace=0.5")
    assert done.returncode == 0, done.stderr
    found = {
        str(json.loads((store / "runs" / name / "run.json").read_text())["cell"]["args.way"]): verdict
        for name, verdict in runs(store).items()
    }
    assert set(found) == set(ENDINGS)
    for way, (verdict, cause, steps) in ENDINGS.items():
        told = found[way]
        assert told["verdict"] == verdict, (way, told)
        assert cause is None or (told["signature"] or {}).get("cause", "") == cause, (way, told)
        assert told["figures"]["steps"] == steps, (way, told["figures"])
        assert told["figures"]["time_to_first_step_s"] > 0
    for way in ("lines", "bar", "child", "shell"):
        figures = found[way]["figures"]
        assert (figures["steady_steps"], figures["steady_tokens"]) == (5, 5 * 1024)
        assert figures["ktok_s"] == pytest.approx(1.024 * 5 / figures["steady_seconds"])
        assert figures["steady_seconds"] > 0.3, "each line was seen when it came, not all at the end"
        assert "train, step 8/8" in done.stderr
    assert "ended in a traceback" in found["swallowed"]["reason"]


def test_a_pattern_that_fits_no_line_is_told_with_the_last_line(tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = [*command("{args.way}"), "args.way=lines,stuck", 'workload.pattern="epoch (?P<step>\\d+)"']
    done = sweeper(store, "-m", *words, "budget.warmup=1.5", "grace=0.5")
    assert done.returncode == 0, done.stderr
    found = {verdict["verdict"]: verdict for verdict in runs(store).values()}
    assert set(found) == {"degraded", "hung"}
    assert found["degraded"]["signature"]["cause"] == "workload.pattern_unmatched"
    for verdict, last in (("degraded", "step 8/8"), ("hung", "step 3/3")):
        reason = found[verdict]["reason"]
        assert "no line matched workload.pattern='epoch (?P<step>\\d+)'; " in reason
        assert f"the last one printed is '{last}: loss" in reason
    assert found["hung"]["reason"].startswith("no progress for 1.5 s in stage warmup; no line matched")
    assert "warning workload.pattern_unmatched: no line matched" in done.stderr
    assert "no line matched workload.pattern=" in done.stdout


def test_a_command_a_script_and_a_module_that_are_not_there_are_named(tmp_path: Path) -> None:
    store = tmp_path / "store"
    lacking = (
        "'trian'",
        "'{python}','trian.py'",
        "'{python}','-m','trian'",
        "'sh','-c','trian --lr 1'",
        "'sh','trian.sh'",
    )
    for words in lacking:
        assert sweeper(store, "workload=command", f"workload.argv=[{words}]").returncode == 0
    found = list(runs(store).values())
    assert len(found) == len(lacking)
    for verdict in found:
        assert (verdict["verdict"], verdict["signature"]["cause"]) == ("failed", "workload.not_found"), verdict
        assert "trian" in verdict["signature"]["evidence"]
        assert "workload.argv" in verdict["signature"]["remedy"]


def test_without_a_pattern_output_is_the_sign_of_life(tmp_path: Path) -> None:
    assert sweeper(tmp_path / "store", *command("lines"), "budget.start=0.9").returncode == 0
    told = only(tmp_path / "store")
    assert (told["verdict"], told["figures"]["steps"]) == ("ok", 0)


def test_settings_and_variables_reach_the_command(tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = [*command("told", "{args.lr}", "--{compile}-{split}", "awk {print $1}"), "args.lr=1e-3", "compile=whole"]
    done = sweeper(store, *words, "workload.env.RATE='x{args.lr}'", "workload.env.FLAG=True")
    assert done.returncode == 0, done.stderr
    (log,) = store.glob("runs/*/child.log")
    told = json.loads(log.read_text())
    assert told["argv"][2:] == ["1e-3", "--whole-1t1d", "awk {print $1}"]
    assert (told["env"]["RATE"], told["env"]["FLAG"]) == ("x1e-3", "True")
    assert told["env"]["SWEEPER_EVENTS"] == str(log.with_name("events.jsonl"))
    run = json.loads(log.with_name("run.json").read_text())
    assert "=" not in log.parent.name, "scripts that read KEY=VALUE choke on it"
    assert run["env"]["RATE"] == "x1e-3"
    assert json.loads(log.with_name("spec.json").read_text())["args"] == {"lr": "1e-3"}


def test_a_command_starts_cold_and_warm_like_any_job(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert sweeper(store, "-m", *command("cached"), READ, "cache=cold,warm").returncode == 0
    found = {verdict["cache"]["requested"]: verdict for verdict in runs(store).values()}
    assert {name: (one["verdict"], one["cache"]["proved"]) for name, one in found.items()} == {
        "cold": ("ok", "cold"),
        "warm": ("ok", "warm"),
    }
    assert "no lookups reported" in found["warm"]["cache"]["why"]


def test_the_function_of_the_docs_reports_steps(tmp_path: Path) -> None:
    (function,) = re.findall(r"<!-- test: report -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(
        function + "for step in range(10, 60, 10):\n"
        "    time.sleep(0.05)\n"
        "    report('step', step=step, steps=50, tokens=256, loss=float('nan') if step == 40 else 2.0,\n"
        "           steady=step > 20)\n"
    )
    store = tmp_path / "store"
    done = sweeper(store, "workload=command", f"workload.argv=['{{python}}','{script}']")
    assert done.returncode == 0
    told = only(store)
    assert (told["verdict"], told["signature"]["cause"]) == ("degraded", "numerics.nan")
    assert "first in step 40" in told["reason"]
    figures = told["figures"]
    assert (figures["steady_steps"], figures["steady_tokens"]) == (3, 768)
    assert figures["ktok_s"] > 0
    names: dict[str, Any] = {}
    exec(function, names)  # and without a harness nothing happens
    names["report"]("step", step=1)


def test_a_workload_of_the_users_own_is_a_file(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    folder = tmp_path / "mine" / "workload"
    folder.mkdir(parents=True)
    (folder / "nano.yaml").write_text(text.replace("train.py", str(TRAINER)).replace("--lr", "lines"))
    store = tmp_path / "store"
    done = sweeper(store, "--config-dir", str(tmp_path / "mine"), "workload=nano", "args.lr=3")
    assert done.returncode == 0, done.stderr
    assert only(store)["figures"]["steady_tokens"] == 5 * 16384
    assert [step["steady"] for step in events(store, "step")] == [False] * 3 + [True] * 5


@pytest.mark.slow
def test_torchruns_workers_are_one_run(tmp_path: Path) -> None:
    store = tmp_path / "store"
    launcher = [
        "'{python}'",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "'--nproc-per-node=2'",
        f"'{TRAINER}'",
        "lines",
    ]
    done = sweeper(store, "workload=command", f"workload.argv=[{','.join(launcher)}]", READ)
    assert done.returncode == 0, done.stderr
    told = only(store)
    assert (told["verdict"], told["figures"]["steps"]) == ("ok", 8)


def read(tmp_path: Path, *overrides: str) -> spec.Run:
    _resolvers(str(tmp_path))
    words = [f"store={tmp_path}/store", "workload=command", *map(_hydras, overrides)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", words, return_hydra_config=True)
    return spec.read([plain(config)])[1][0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["workload.pattern='(?P<step>'"], "is no regular expression"),
        (["workload.pattern='step'"], "must have named groups, known: step, steps, tokens"),
        (["workload.pattern='(?P<stop>x)'"], "unknown: stop"),
        (["workload.pattern='(?P<step>x*)'"], "must not fit an empty line"),
        (["workload.pattern='(?P<tokens>x)(?P<tok_s>y)'"], "tells tokens twice"),
        (["workload.pattern='(?P<tokens>x)'", "workload.tokens=5"], "tells tokens twice"),
        (["workload.pattern=[a]"], "must be a regular expression"),
        (["workload.tokens=5"], "give a pattern"),
        (["workload.tokens=-1"], "must be a whole number from 0"),
        (["args.lr=1"], "the command is not told of it"),
        (["workload.argv=[a,'{args.lr}']"], "needs args.lr="),
        (["args.lr=[1]", "workload.argv=[a,'{args.lr}']"], "must be one value"),
        (["workload.env.WANDB_API_KEY=abc"], "looks like a secret"),
        (["workload.env.TRITON_CACHE_DIR=/x"], "is what the harness itself sets"),
        (
            ["workload.argv=[a,'x-{foo}']"],
            "workload.argv={foo}: stands for nothing; known: {python}, {out}, {spec}, {c",
        ),
        (["workload.env.A='{sede}'"], "workload.env.A={sede}: stands for nothing"),
        (["workload.env.SWEEPER_EVENTS=/x"], "is what the harness itself sets"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=re.escape(said)) as error:
        read(tmp_path, "workload.argv=[a]", *words)
    assert "abc" not in str(error.value)


def test_what_a_command_is_told_and_how_it_is_read_make_it_another_run(tmp_path: Path) -> None:
    words = ["workload.argv=[a,'{args.lr}']", "args.lr=1"]
    one = read(tmp_path, *words)
    others = (["args.lr=2"], ["workload.env.A=1"], ["workload.pattern='(?P<step>x)'"])
    assert len({one.identity, *(read(tmp_path, *words, *other).identity for other in others)}) == 4
    assert read(tmp_path, *words).identity == one.identity


def test_braces_of_the_commands_own_are_handed_over_in_an_argument(tmp_path: Path) -> None:
    run = read(tmp_path, "workload.argv=[a,'{args.file}','{print $1}']", "args.file='ckpt-{step}.pt'")
    assert [fill(word, values(run.spec)) for word in run.workload.argv] == ["a", "ckpt-{step}.pt", "{print $1}"]


def test_a_command_may_want_more_devices_than_there_are(tmp_path: Path) -> None:
    assert read(tmp_path, "workload.argv=[a]", "split=8t8d").skip == ""


def follow(pieces: list[bytes], pattern: str = PATTERN, tokens: int = 0) -> list[dict[str, Any]]:
    """The step events of output that comes in these pieces."""
    told: list[dict[str, Any]] = []
    printed = Printed(pattern, tokens, 1, lambda event, **fields: told.append({"event": event, **fields}))
    for piece in pieces:
        printed.feed(piece)
    printed.close()
    return [{k: v for k, v in event.items() if k != "seconds"} for event in told if event["event"] == "step"]


ENDS = st.sampled_from(["\n", "\r", "\r\n", "\n\n"])
STEPS = st.builds(lambda n, end: f"step {n}/9: loss 1.5 | 1,024 tokens{end}".encode(), st.integers(0, 99), ENDS)
NOISE = st.builds(lambda noise, end: noise.replace(b"step", b"") + end.encode(), st.binary(max_size=40), ENDS)


@settings(deadline=None)
@given(st.lists(STEPS | NOISE, max_size=12), st.data())
def test_it_does_not_matter_in_what_pieces_output_comes(lines: list[bytes], data: st.DataObject) -> None:
    text = b"".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = follow([text])
    assert follow(pieces) == whole
    numbers = [event["step"] for event in whole]
    assert numbers == sorted(set(numbers)), "steps count on, whatever numbers are printed"


def test_numbers_that_begin_again_count_on_and_tokens_of_a_step_are_multiplied() -> None:
    lines = [f"it {n}\n".encode() for n in (10, 20, 20, 30, 10, 20)]
    found = follow(lines, r"it (?P<step>\d+)", tokens=100)
    assert [event["step"] for event in found] == [10, 20, 30, 31, 41]
    assert [event["tokens"] for event in found] == [100, 1000, 1000, 100, 1000]
    assert [event["steady"] for event in found] == [False, True, True, True, True]
    counted = follow([b"loss 3\nloss 2\nloss what\n"], r"loss (?P<loss>\S+)")
    assert [(event["step"], event.get("loss")) for event in counted] == [(1, 3.0), (2, 2.0), (3, None)]


def test_a_line_without_end_is_bounded_and_the_next_is_read() -> None:
    pieces = [b"x" * 100_000] * 50 + [b"\nstep 1/2: loss 1 | 5 tokens"]
    assert [event["step"] for event in follow(pieces)] == [1]


def test_a_rate_becomes_tokens_by_the_commands_own_clock() -> None:
    lines = [b"1 12.5K/s 200ms\n", b"3 10K/s 200ms\n"]
    found = follow(lines, r"(?P<step>\d+) (?P<tok_s>\S+)/s (?P<seconds>\S+)")
    assert [event["tokens"] for event in found] == [2500, 4000]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234.5", 1234.5), ("1e-3", 1e-3), ("12.3K", 12300.0), ("25.5ms", 0.0255), (" 7 ", 7.0), ("-.5", -0.5)],
)
def test_numbers_as_programs_print_them(text: str, value: float) -> None:
    assert number(text) == pytest.approx(value)


def test_what_is_no_number_is_none() -> None:
    assert [number(text) for text in ("", "x", "1.2.3", "12:30", None)] == [None] * 5
    assert number("NaN") != number("NaN")
    assert number("-inf") == -math.inf
