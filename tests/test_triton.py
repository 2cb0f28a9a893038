"""The Triton kernels against dense attention in float64: outputs and all gradients, over random masks.

On a machine with a GPU they run as they are; elsewhere in Triton's interpreter, which must be chosen before triton is
imported. So without a GPU this file runs itself again in a process of its own, and here only what needs neither.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import small_drafter
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.attention import DFlashMask, attend_dense, visible
from dflash.probe import Probe
from dflash.settings import JobSettings, SettingError
from dflash.strategies import check, make

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's tl.dot of bfloat16 is wrong (3.9)
FULL = torch.float32 if INTERPRETED else HALF  # a GPU's kernels of float32 products take minutes to compile
RUNS_HERE = INTERPRETED or torch.cuda.is_available()

kernels = pytest.mark.skipif(not RUNS_HERE, reason="run in Triton's interpreter, by the test of that name")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if RUNS_HERE:
    from dflash.attention.alike import attend_alike, lines
    from dflash.attention.triton import Ranges, _attention, attend_triton, prepare_ranges


@pytest.mark.slow
@pytest.mark.skipif(RUNS_HERE, reason="the kernels' tests run here")
def test_the_kernels_hold_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if "only 0-dimensional arrays can be converted" in done.stdout:
        pytest.skip("the interpreter of triton 3.6 does not work with numpy 2.4")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(RUNS_HERE)
    yield
    torch.use_deterministic_algorithms(False)


@st.composite
def cases(draw: st.DrawFn) -> tuple[DFlashMask, tuple[int, int, int], torch.dtype, float, int]:
    """Rows of packed documents with a padded tail; sorted anchors, or not; (query heads, key heads, head dimension)."""
    seed = draw(st.integers(0, 10_000))
    made = random.Random(seed)
    rows, context, block = made.choice([1, 1, 2]), made.randint(60, 400), made.choice([4, 7, 8, 16, 32])
    blocks = made.randint(1, max(1, made.choice([40, 160]) // block))
    documents, anchors = [], []
    for _ in range(rows):
        cuts = sorted(made.sample(range(1, context), made.choice([0, 1, 4])))
        padding = made.choice([0, 30])
        ids = [sum(t >= cut for cut in cuts) for t in range(context - padding)]
        documents.append(ids + [-1] * padding)
        taken = made.sample(range(context - padding), made.choice([blocks, blocks // 2, 0]))
        row = sorted(taken) + [-1] * (blocks - len(taken))
        if made.random() < 0.1:
            made.shuffle(row)
        anchors.append(row)
    window = made.choice([None, None, max(block, 20), 100])
    key_heads, width = made.choice([1, 2]), made.choice([64, 128])
    heads = key_heads * made.choice([1, 2, 3, 4])
    dtype = made.choice([FULL, FULL, HALF])
    loudness = made.choice([1.0, 1.0, 12.0])  # 12: scores too large to do without the maximum
    mask = DFlashMask(torch.tensor(documents), torch.tensor(anchors), block, window)
    return mask, (heads, key_heads, width), dtype, loudness, seed


def on(mask: DFlashMask, device: str) -> DFlashMask:
    return DFlashMask(mask.document.to(device), mask.anchors.to(device), mask.block, mask.window)


def inputs(
    mask: DFlashMask, heads: tuple[int, int, int], dtype: torch.dtype, seed: int, loudness: float = 1.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v as a drafter's projections leave them, [R, H, L, d] views of [R, L, H, d], and the output's gradient."""
    (rows, context), slots = mask.document.shape, mask.anchors.shape[1] * mask.block
    made = torch.Generator().manual_seed(seed)
    query_heads, key_heads, width = heads
    shapes = [(query_heads, slots), (key_heads, context + slots), (key_heads, context + slots), (query_heads, slots)]
    q, k, v, grad = (torch.randn(rows, n, h, width, generator=made).transpose(1, 2) for h, n in shapes)
    return [x.to(DEVICE, dtype).requires_grad_() for x in (q * loudness, k, v)], grad.to(DEVICE, dtype)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the whole, relative where the whole is not next to nothing: NaN and unwritten memory never pass."""
    return ((got.double() - wanted).norm() / wanted.norm().clamp(min=1.0)).item()


def assert_close(
    got: list[torch.Tensor], wanted: list[torch.Tensor], dtype: torch.dtype, loudness: float = 1.0
) -> None:
    """Within twice what roundings alone do to dense attention. In 16 bits that grows with loud queries: gradients are
    differences of outputs that are nearly one value each (over 600 of `cases` 0.4 % at most, and 1.5 %).
    """
    largest = 1e-5 if dtype == torch.float32 else 3e-2 if loudness > 1 else 1e-2
    for name, one, other in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert one.dtype == dtype
        assert error(one, other) < largest, name


def assert_exact(mask: DFlashMask, q_k_v: list[torch.Tensor], grad: torch.Tensor, loudness: float = 1.0) -> None:
    mask = on(mask, DEVICE)
    out = attend_triton(*q_k_v, prepare_ranges(mask))
    got = [out, *torch.autograd.grad(out, q_k_v, grad)]
    wide = [x.detach().double().requires_grad_() for x in q_k_v]
    reference = attend_dense(*wide, visible(mask))
    wanted = [reference, *torch.autograd.grad(reference, wide, grad.double())]
    assert_close(got, wanted, grad.dtype, loudness)
    empty = (mask.anchors < 0).repeat_interleave(mask.block, dim=1)[:, None, :, None]
    assert not out.masked_fill(~empty, 0).any()
    assert not got[1].masked_fill(~empty, 0).any()


@kernels
@given(cases())
@settings(max_examples=12 if INTERPRETED else 5, deadline=None)
def test_outputs_and_gradients_are_those_of_dense_attention(case) -> None:
    mask, heads, dtype, loudness, seed = case
    assert_exact(mask, *inputs(mask, heads, dtype, seed, loudness), loudness)


def questions(mask: DFlashMask) -> torch.Tensor:
    """A number for each slot's query, int64 [R, Q]: one for all at one token of a document, anchors apart."""
    seen: dict[tuple[int, ...], int] = {}
    document, anchors = mask.document.tolist(), mask.anchors.tolist()

    def question(r: int, i: int, k: int) -> int:
        a = anchors[r][i]
        same = (r, i, k) if k == 0 or a < 0 else (r, document[r][a], a + k, -1)
        return seen.setdefault(same, len(seen))

    return torch.tensor(
        [[question(r, i, k) for i in range(len(row)) for k in range(mask.block)] for r, row in enumerate(anchors)]
    )


def assert_alike(mask: DFlashMask, q_k_v: list[torch.Tensor], grad: torch.Tensor, loudness: float = 1.0) -> None:
    """Queries drawn from a table, of which the gradient is asked; the first lines of `q` are the table."""
    number = questions(mask).to(DEVICE)
    mask = on(mask, DEVICE)
    q, k, v = q_k_v
    table = q.detach().transpose(1, 2).flatten(0, 1)[: int(number.max()) + 1].contiguous().requires_grad_()

    def asked(table: torch.Tensor) -> torch.Tensor:
        return table[number].transpose(1, 2)

    out = attend_alike(asked(table), k, v, prepare_ranges(mask))
    got = [out, *torch.autograd.grad(out, (table, k, v), grad)]
    wide = [x.detach().double().requires_grad_() for x in (table, k, v)]
    reference = attend_dense(asked(wide[0]), wide[1], wide[2], visible(mask))
    wanted = [reference, *torch.autograd.grad(reference, wide, grad.double())]
    assert_close(got, wanted, grad.dtype, loudness)
    empty = (mask.anchors < 0).repeat_interleave(mask.block, dim=1)[:, None, :, None]
    assert not out.masked_fill(~empty, 0).any()


@kernels
@given(cases())
@settings(max_examples=30 if INTERPRETED else 8, deadline=None)
def test_slots_with_one_query_share_what_they_see(case) -> None:
    mask, heads, dtype, loudness, seed = case
    assert_alike(mask, *inputs(mask, heads, dtype, seed, loudness), loudness)


@kernels
@pytest.mark.parametrize("window", [None, 16, 17, 90])
@pytest.mark.parametrize("near", [1, 3, 20])
def test_shared_questions_are_few_and_every_slot_finds_its_own(near: int, window: int | None) -> None:
    """Anchors one, three and twenty tokens apart, over a document's end, at a row's end, and one twice."""
    document = torch.tensor([[0] * 200 + [1] * 150])
    anchors = [[40 + near * i for i in range(7)] + [190, 196, 203, 349, 349, -1]]
    mask = DFlashMask(document, torch.tensor(anchors), 16, window)
    assert_alike(mask, *inputs(mask, (2, 1, 64), FULL, seed=7))
    if window == 16:
        return  # nothing is shared
    made = lines(prepare_ranges(on(mask, DEVICE)), 350)
    there = made.seen.anchor[0].tolist()
    count = len(set(questions(mask)[0, : 12 * 16].tolist()))
    assert all(b >= 0 for b in there[:count])
    assert set(there[count:]) == {-1}
    assert there[:count] == sorted(there[:count])
    number, source, place = questions(mask)[0], made.source[0].long().cpu(), made.place[0].long().cpu()
    assert torch.equal(number[source[place]][: 12 * 16], number[: 12 * 16])


@kernels
@pytest.mark.parametrize("window", [None, 300])
def test_tiles_seen_in_full(window: int | None) -> None:
    """Long enough that most of a row's keys need no mask, for a window too."""
    document = torch.tensor([[0] * 500 + [1] * 200])
    anchors = torch.tensor([sorted(random.Random(0).sample(range(300, 700), 12))])
    mask = DFlashMask(document, anchors, 16, window)
    begin, all_begin, all_end, end = prepare_ranges(on(mask, DEVICE)).tiles[0].T.tolist()
    assert any(a < b for a, b in zip(all_begin, all_end, strict=True))
    assert all(a <= b <= c <= d for a, b, c, d in zip(begin, all_begin, all_end, end, strict=True))
    assert_exact(mask, *inputs(mask, (2, 1, 64), FULL, seed=1))


@kernels
def test_strides_do_not_matter() -> None:
    mask = DFlashMask(torch.zeros(1, 90, dtype=torch.int64), torch.tensor([[5, 40, 80]]), 8)
    q_k_v, grad = inputs(mask, (4, 2, 64), FULL, seed=2)
    odd = [torch.cat([x, x], -1)[..., 1:65].detach().requires_grad_() for x in q_k_v]  # no multiple of 16 bytes
    plain = [x.detach().contiguous().requires_grad_() for x in odd]
    ranges = prepare_ranges(on(mask, DEVICE))
    for one, other in zip(
        torch.autograd.grad(attend_triton(*odd, ranges), odd, grad),
        torch.autograd.grad(attend_triton(*plain, ranges), plain, grad),
        strict=True,
    ):
        assert torch.equal(one, other)


@kernels
def test_equal_bits_every_time() -> None:
    mask = DFlashMask(torch.zeros(1, 200, dtype=torch.int64), torch.tensor([[50, 120, 180, -1]]), 16)
    q_k_v, grad = inputs(mask, (4, 1, 64), HALF, seed=3)
    ranges = prepare_ranges(on(mask, DEVICE))
    runs = []
    for _ in range(2):
        out = attend_triton(*q_k_v, ranges)
        runs.append([out, *torch.autograd.grad(out, q_k_v, grad)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@kernels
def test_a_compiled_forward_can_hold_it() -> None:
    """As operators that torch.compile does not look into, gradients included."""
    mask = on(DFlashMask(torch.zeros(1, 80, dtype=torch.int64), torch.tensor([[30, 60]]), 8), DEVICE)
    q_k_v, grad = inputs(mask, (2, 1, 64), FULL, seed=4)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_triton(q * 2, k, v, prepare_ranges(mask))

    wanted = torch.autograd.grad(forward(*q_k_v), q_k_v, grad)
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="aot_eager")
    for one, other in zip(torch.autograd.grad(compiled(*q_k_v), q_k_v, grad), wanted, strict=True):
        torch.testing.assert_close(one, other)
    ranges = prepare_ranges(mask)
    assert isinstance(ranges, Ranges)
    torch.library.opcheck(_attention, (*q_k_v, *ranges), test_utils=("test_schema", "test_faketensor"))


@kernels
def test_a_head_dimension_without_tiles_is_told() -> None:
    mask = on(DFlashMask(torch.zeros(1, 9, dtype=torch.int64), torch.tensor([[5]]), 4), DEVICE)
    q_k_v, _ = inputs(mask, (1, 1, 48), torch.float32, seed=5)
    with pytest.raises(ValueError, match=r"drafter.head_dim=48: compile=triton takes one of 16, 32, 64, 128"):
        attend_triton(*q_k_v, prepare_ranges(mask))


def test_a_job_is_refused_before_it_starts() -> None:
    geometry = small_drafter.make().geometry  # heads of 6
    check("locked", geometry)
    check("triton", dataclasses.replace(geometry, head_dim=64))
    with pytest.raises(SettingError, match=r"drafter.head_dim=6: compile=triton takes one of 16, 32, 64, 128"):
        check("triton", geometry)
    wish = {"data": {"path": "-"}, "target": {"model": "-"}, "compile": "triton", "train": {"precision": "float32"}}
    with pytest.raises(SettingError, match=r"train.precision.*float32.*must be auto or bfloat16 with compile=triton"):
        JobSettings.from_dict(wish).check()


@on_gpu
def test_the_strategy_counts_its_calls_and_compiles_nothing(probe: Probe) -> None:
    strategy = make("triton", "cuda", probe)
    mask = on(DFlashMask(torch.zeros(1, 90, dtype=torch.int64), torch.tensor([[5, 40, 80]]), 8), "cuda")
    q_k_v, grad = inputs(mask, (4, 2, 64), torch.bfloat16, seed=6)
    before = probe.counters()

    def body() -> None:
        strategy.attend(*q_k_v, strategy.prepare(mask)).backward(grad)

    strategy.run("drafter0", "one", body)
    after = probe.counters()
    assert (after["attention_calls"], after["uncompiled_calls"]) == (before["attention_calls"] + 1, 0)
    assert after["compiles"] == before["compiles"]
