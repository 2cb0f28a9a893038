"""A bisect names the first bad level, says how sure it is, and asks for no more runs than that takes."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import forked
import numpy as np
import pytest
from fakes import packages
from fakes.command import started, until
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.settings import SettingError
from sweeper.__main__ import _hydras, _resolvers
from sweeper.bisect import search, speed
from sweeper.bisect.__main__ import bisect as carry_out
from sweeper.bisect.question import Question, parse
from sweeper.bisect.search import Answer, believe, decide
from sweeper.composed import plain
from sweeper.help import CONF
from sweeper.store import Attempt

Symptoms = list[list[bool | None]]


def ask(
    levels: int, oracle: Callable[[int], bool | None], error: float = 0.01, most: int = 400
) -> tuple[Answer, Symptoms]:
    """The answer to a history, and what was seen on the way."""
    seen: Symptoms = [[] for _ in range(levels)]
    while not isinstance(step := decide(seen, error, most), Answer):
        seen[step].append(oracle(step))
    return step, seen


@settings(deadline=None)
@given(st.integers(2, 80), st.data())
def test_a_change_that_always_shows_is_found_in_about_log2_runs(levels: int, data: st.DataObject) -> None:
    change = data.draw(st.integers(1, levels - 1))
    answer, seen = ask(levels, lambda level: level >= change)
    assert (answer.kind, answer.good, answer.bad) == ("found", change - 1, change)
    assert answer.sure >= 0.99
    assert sum(map(len, seen)) <= math.log2(levels) + 13
    for level in (0, change - 1, change, levels - 1):
        assert len(seen[level]) >= 3, "the ends and both neighbours are confirmed"


@settings(deadline=None)
@given(st.integers(3, 40), st.data())
def test_levels_that_tell_nothing_are_stepped_over_and_named(levels: int, data: st.DataObject) -> None:
    change = data.draw(st.integers(1, levels - 1))
    mute = data.draw(st.sets(st.integers(1, levels - 2)))
    answer, seen = ask(levels, lambda level: None if level in mute else level >= change)
    assert answer.kind == "found"
    assert answer.good == max(level for level in range(change) if level not in mute)
    assert answer.bad == min(level for level in range(change, levels) if level not in mute)
    assert all(len(seen[level]) <= search.TRIES for level in mute)


@pytest.mark.parametrize(("p", "q"), [(0.7, 0.0), (0.4, 0.0), (0.9, 0.1)])
def test_what_shows_only_sometimes_is_found_too(p: float, q: float) -> None:
    wrong = silent = 0
    for seed in range(40):
        draw = random.Random(seed)
        change = draw.randrange(1, 12)
        answer, _ = ask(12, lambda level, k=change, d=draw: d.random() < (p if level >= k else q), 0.02)  # type: ignore[misc]
        wrong += answer.kind == "found" and answer.bad != change
        silent += answer.kind != "found"
    # 40 answers of which each may be wrong with 2 %: 4 or more have a chance of 1 in 1000.
    assert wrong <= 3
    assert silent <= 4


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_where_nothing_changes_no_level_is_named(rate: float) -> None:
    for seed in range(10):
        draw = random.Random(seed)
        answer, seen = ask(9, lambda level, d=draw: d.random() < rate, most=300)  # type: ignore[misc]
        assert answer.kind in ("alike", "unsure"), (seed, answer)
        if rate in (0.0, 1.0):
            assert answer.kind == "alike"
            assert not any(seen[1:-1]), "levels between ends that are alike are not run"


def test_a_list_the_wrong_way_round_has_no_first_bad_level() -> None:
    answer, seen = ask(9, lambda level: level < 4)
    assert answer.kind == "alike"
    assert sum(map(len, seen)) < 10


def test_an_end_that_cannot_be_run_is_said() -> None:
    assert ask(5, lambda level: None if level == 4 else False)[0] == Answer("stuck", level=4)
    assert ask(5, lambda level: None if level == 0 else True)[0] == Answer("stuck", level=0)


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([True, False, None]), max_size=5), min_size=2, max_size=9))
def test_any_history_has_a_next_run_or_an_answer_and_no_more_than_most(seen: Symptoms) -> None:
    step = decide(seen, 0.01, 20)
    if isinstance(step, Answer):
        assert 0 <= step.good <= step.bad < len(seen)
        assert 0 <= step.sure <= 1 + 1e-9
    else:
        assert sum(map(len, seen)) < 20
        assert not search.stepped_over(seen[step])
    belief = search.tally(seen)
    assert (belief is None) == (search.stepped_over(seen[0]) or search.stepped_over(seen[-1]))
    if belief:
        assert belief.first_bad[0] == 0
        assert sum(belief.first_bad) + belief.alike == pytest.approx(1)


def test_the_posterior_is_that_of_the_model() -> None:
    """Summed by hand over every pair of rates."""
    bad, good = [0, 1, 3], [4, 1, 0]
    pairs = [
        (p, q, wp * wq)
        for (p, wp), (q, wq) in product(search.BAD_RATES.items(), search.GOOD_RATES.items())
        if p - q >= search.APART
    ]
    scale = sum(weight for _, _, weight in pairs)

    def likelihood(rates: list[float]) -> float:
        return math.prod(r**b * (1 - r) ** g for r, b, g in zip(rates, bad, good, strict=True))

    joint = [0.0, 0.0, 0.0]
    for level in (1, 2):
        for p, q, weight in pairs:
            joint[level] += weight / scale / 2 * likelihood([q if at < level else p for at in range(3)])
    rates = sorted({*search.BAD_RATES, *search.GOOD_RATES})
    one_rate = sum((0.5 if r == search.NEVER else 0.5 / (len(rates) - 1)) * likelihood([r, r, r]) for r in rates)
    turned = sum(weight / scale * likelihood([p, q, q]) for p, q, weight in pairs)
    none = (one_rate + turned) / 2
    weights = np.array([*((1 - search.NONE) * x for x in joint), search.NONE * none])
    weights /= weights.sum()
    found = believe(bad, good)
    assert [*found.first_bad, found.alike] == pytest.approx(list(weights))


def test_more_passes_are_needed_where_failures_are_rarer() -> None:
    """A passing neighbour is believed sooner if every run of the bad end fails."""
    passes = []
    for failed, passed in ((8, 0), (4, 4), (2, 6)):
        count = 1
        while believe([0, 0, failed], [8, count, passed]).first_bad[2] < 0.99:
            count += 1
        passes.append(count)
    assert passes == sorted(passes)
    assert passes[0] <= 2
    assert passes[2] >= 8


def slow(levels: int, oracle: Callable[[int], float | None], slower: float = 0.05) -> tuple[Answer, int]:
    seen: list[list[float | None]] = [[] for _ in range(levels)]
    while True:
        step: int | Answer | Symptoms = speed.symptoms(seen, slower, 0.01, 200)
        if isinstance(step, list):
            step = decide(step, 0.01, 200)
        if isinstance(step, Answer):
            return step, sum(map(len, seen))
        seen[step].append(oracle(step))


@settings(deadline=None)
@given(st.integers(2, 30), st.floats(0.06, 0.6), st.data())
def test_a_slow_down_is_found_where_it_began(levels: int, by: float, data: st.DataObject) -> None:
    change = data.draw(st.integers(1, levels - 1))
    draw = random.Random(data.draw(st.integers(0, 99)))
    answer, runs = slow(levels, lambda level: (1 - by * (level >= change)) * math.exp(draw.gauss(0, by / 40)))
    assert (answer.kind, answer.bad) == ("found", change)
    assert runs <= math.log2(levels) + 15


def test_a_smaller_slow_down_than_asked_for_and_noise_alone_are_none() -> None:
    draw = random.Random(3)
    answer, _ = slow(8, lambda level: (0.99 if level > 3 else 1.0) * math.exp(draw.gauss(0, 0.001)))
    assert answer.kind == "alike"
    for seed in range(20):
        draw = random.Random(seed)
        assert slow(8, lambda level, d=draw: math.exp(d.gauss(0, 0.1)))[0].kind == "alike", seed
    assert slow(4, lambda level: None if level == 3 else 1.0)[0] == Answer("stuck", level=3)


VERDICTS = [
    # verdict, cause, seconds of the child: what it says to any failure, to one of compile.fx_trace_race
    ("ok", None, 3.0, False, False),
    ("degraded", "numerics.nan", 3.0, False, False),
    ("failed", "memory.gpu_oom", 3.0, True, None),
    ("failed", "compile.fx_trace_race", 3.0, True, True),
    ("hung", "process.hung", 3.0, True, None),
    ("failed", "env.wheel_unavailable", 0.0, None, None),
    ("skipped", None, 0.0, None, None),
]


@pytest.mark.parametrize(("verdict", "cause", "child_s", "any_failure", "race"), VERDICTS)
def test_a_run_answers_the_question_or_not_at_all(
    verdict: str, cause: str | None, child_s: float, any_failure: bool | None, race: bool | None
) -> None:
    signature = {"cause": cause, "fingerprint": "0123456789ab"} if cause else None
    told = {"verdict": verdict, "signature": signature, "child_s": child_s, "figures": {"ktok_s": 2.0}}
    attempt = Attempt(Path("x"), {}, told)
    assert Question("wheel", "a,b").read(attempt).symptom is any_failure
    assert Question("wheel", "a,b", "compile.fx_trace_race").read(attempt).symptom is race
    measured = Question("wheel", "a,b", slower=0.05).read(attempt)
    assert (measured.symptom, measured.ktok_s) == (None, 2.0 if verdict == "ok" else None)
    if cause:
        assert Question("wheel", "a,b", "0123456789ab").read(attempt).symptom is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["levels=a,b"], "factor=???: must be given"),
        (["factor=wheel"], "levels=???: must be given"),
        (["factor=wheel", "levels=a,b", "signature=nonsense"], "must be a cause or a fingerprint"),
        (["factor=wheel", "levels=a,b", "slower=-5%"], "must be a share"),
        (["factor=wheel", "levels=a,b", "slower=fast"], "must be a share"),
        (["factor=wheel", "levels=a,b", "error=99%"], "must be a share"),
        (["factor=wheel", "levels=a,b", "slower=5%", "signature=numerics.nan"], "is another symptom"),
        (["factor=wheel", "levels=a,b", "most=0"], "must be a whole number of runs"),
        (["factor=wheel", "levels=a,b", "wheel=a"], "levels= says what wheel is"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=said.replace("?", r"\?")):
        parse(words)


def test_the_rest_of_the_words_are_settings() -> None:
    question, rest = parse(["factor=args.commit", "levels=1e5,12345", "-m", "slower=5%", "most=7", "seed=3"])
    assert question == Question("args.commit", "1e5,12345", slower=0.05, most=7)
    assert rest == ["seed=3"]


SCRIPT = """
import json, os, sys, time
level, first, broken = (int(word) for word in sys.argv[1:4])
if level == broken:
    sys.exit("no such commit")
speed = 0.5 if "slow" in sys.argv and level >= first else 1.0
with open(os.environ["SWEEPER_EVENTS"], "a") as file:  # a made-up clock: speeds are exact
    for step in range(1, 7):
        told = {"event": "step", "t": 1e9 + step / speed, "step": step, "tokens": 1000, "steady": step > 2}
        file.write(json.dumps(told) + "\\n")
time.sleep(float(os.environ.get("PAUSE", 0)))
if level >= first and "slow" not in sys.argv:
    raise RuntimeError("CUDA error: device-side assert triggered")
"""


def bisect(store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.run("sweeper.bisect", *words, f"store={store}", "tracking=none", cwd=store.parent, timeout=120)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "store"


def question(*argv: str, levels: str = "1,2,3,4,5") -> list[str]:
    words = ",".join(f"'{word}'" for word in ("{python}", "train.py", "{args.n}", *argv))
    return ["factor=args.n", f"levels={levels}", "workload=command", f"workload.argv=[{words}]"]


def attempts(store: Path) -> list[str]:
    return sorted(path.parent.name for path in store.glob("runs/*/verdict.json"))


def test_the_command_finds_the_level_uses_what_is_done_and_steps_over(store: Path) -> None:
    words = [*question("4", "3"), "signature=cuda.device_assert"]
    done = bisect(store, *words)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("The first bad args.n is one of 3, 4: 2 is good (0 of ")
    assert "4 is bad (3 of 3)" in said
    assert said.endswith("Stepped over: 3 (failed unknown).")
    first = attempts(store)
    again = bisect(store, *words)
    assert (again.stdout, attempts(store)) == (done.stdout, first), "nothing is run twice"
    kept = next(store.glob("sweeps/*/bisect.txt")).read_text()
    assert kept == done.stdout
    other = bisect(store, *question("4", "3"), "dry=true")
    assert re.search(r"^3 +2 +2 ", other.stdout, re.MULTILINE), "to any failure the same runs say more"
    assert "Not finished: next is run 3 of 3." in other.stdout


def test_the_command_finds_a_slow_down(store: Path) -> None:
    done = bisect(store, *question("4", "0", "slow", levels="1,2,3,4,5"), "slower=20%")
    assert done.returncode == 0, done.stderr
    assert "The first bad args.n is 4: 3 is good" in done.stdout
    assert ", -50.0%; " in done.stdout


def test_a_bisect_that_was_killed_goes_on(store: Path) -> None:
    words = [*question("3", "0", levels="1,2,3,4"), "workload.env.PAUSE=0.4"]
    with started(store, *words, module="sweeper.bisect") as process:
        until(lambda: len(attempts(store)) >= 3)
        process.kill()
        process.wait()
    before = attempts(store)
    done = bisect(store, *words)
    assert done.returncode == 0, done.stderr
    assert "The first bad args.n is 3:" in done.stdout
    found = attempts(store)
    assert set(before) <= set(found)
    finished = {json.loads((store / "runs" / name / "run.json").read_text())["identity"] for name in before}
    repeated = [name for name in found if not name.endswith(".a1")]
    assert len(repeated) <= 1, "the run that was killed, and no other"
    assert not any(name.split("-r")[0][-12:] in {one[:12] for one in finished} for name in repeated)


def test_only_wheels_that_are_run_are_built(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(store.parent / "uv"))
    shelf = store.parent / "shelf"
    packages.rest(shelf)
    versions = [f"2.{minor}.0" for minor in range(80, 90)]
    for version in versions:
        if version != "2.85.0":  # which cannot be had
            packages.torch(shelf, version)
    code = "import sys, torch; sys.exit(int(torch.__version__ >= \\'2.86\\'))"
    words = ["factor=wheel.torch", f"levels={','.join(versions)}", "wheel=pins", "workload=command"]
    words += [f"workload.argv=['{{python}}','-c','{code}']", f"wheels.dir={store}/wheels"]
    done = bisect(store, *words, f"wheels.find_links=['{shelf}']", "wheels.index=[]")
    assert done.returncode == 0, done.stderr
    assert "The first bad wheel.torch is one of 2.85.0, 2.86.0: 2.84.0 is good" in done.stdout
    assert "Stepped over: 2.85.0 (failed env.wheel_unavailable)" in done.stdout
    built = re.findall(r"building torch==(\S+)", done.stderr)
    assert {"2.80.0", "2.84.0", "2.85.0", "2.86.0", "2.89.0"} <= set(built)
    assert len(set(built)) < len(versions)
    assert len(built) == len(set(built)), "none is built twice"


@pytest.mark.parametrize(
    ("levels", "more", "said"),
    [
        (["1"], [], "must be at least two levels"),
        (["1", "2", "1"], [], "1 and 1 mean the same run"),
        (["1", "2"], ["repeat=3"], "decides by itself how often"),
        (["1", "2"], ["rerun=failed"], "uses what is done"),
        (["1", "2"], ["aa=true"], "measures the spread"),
        (["1 cache=cold", "2 cache=warm"], [], "must be one level: a bisect varies args.n alone"),
    ],
)
def test_what_is_no_list_of_levels_is_refused(tmp_path: Path, levels: list[str], more: list[str], said: str) -> None:
    _resolvers(str(tmp_path))
    words = [f"store={tmp_path}/store", "workload=command", "workload.argv=[a,'{args.n}']", *more]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cells = [
            compose("config", [*words, *map(_hydras, f"args.n={one}".split())], return_hydra_config=True)
            for one in levels
        ]
    with pytest.raises(SettingError, match=said):
        carry_out(list(map(plain, cells)), Question("args.n", ",".join(levels)))
    assert not (tmp_path / "store").exists()


def test_what_hydra_cannot_read_is_one_sentence(store: Path) -> None:
    done = bisect(store, "factor=wheel", "levels=current,nonsense")
    assert done.returncode == 2
    assert done.stderr.startswith("sweeper: wheel=nonsense: unknown level")
    assert len(done.stderr.splitlines()) == 1
    assert not store.exists()
