"""Who sees whom, against a plain loop; and what attention makes of it, against float64 by hand."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dflash.attention import DFlashMask, attend_dense, attend_flex, block_mask, rule, visible


@st.composite
def masks(draw: st.DrawFn) -> DFlashMask:
    """Packed rows with a padded tail, blocks with sorted anchors, some of them empty."""
    rows, context = draw(st.integers(1, 2)), draw(st.integers(2, 14))
    blocks, block = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    documents, anchors = [], []
    for _ in range(rows):
        lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        ids = [i for i, n in enumerate(lengths) for _ in range(n)][:context]
        documents.append(ids + [-1] * (context - len(ids)))
        chosen = draw(st.lists(st.integers(0, len(ids) - 1), max_size=blocks, unique=True))
        anchors.append(sorted(chosen) + [-1] * (blocks - len(chosen)))
    window = draw(st.none() | st.integers(1, 6))
    return DFlashMask(torch.tensor(documents), torch.tensor(anchors), block, window)


def by_hand(mask: DFlashMask, row: int, query: int, key: int) -> bool:
    context = mask.document.shape[1]
    i, k = divmod(query, mask.block)
    anchor = int(mask.anchors[row, i])
    if anchor == -1:
        return False
    if key >= context:
        return (key - context) // mask.block == i
    same_document = int(mask.document[row, key]) == int(mask.document[row, anchor])
    in_window = mask.window is None or anchor + k - key < mask.window
    return key < anchor and same_document and in_window


def sizes(mask: DFlashMask) -> tuple[int, int, int]:
    rows, context = mask.document.shape
    queries = mask.anchors.shape[1] * mask.block
    return rows, queries, context + queries


def inputs(mask: DFlashMask, heads: int, key_heads: int, seed: int) -> list[torch.Tensor]:
    rows, queries, keys = sizes(mask)
    made = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, queries, 4), (rows, key_heads, keys, 4), (rows, key_heads, keys, 4)]
    return [torch.randn(s, generator=made, dtype=torch.float64, requires_grad=True) for s in shapes]


def attention_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DFlashMask) -> torch.Tensor:
    """One query at a time over the keys it sees, and nothing for a query that sees none."""
    rows, queries, keys = sizes(mask)
    group = q.shape[1] // k.shape[1]
    out = []
    for row in range(rows):
        for head in range(q.shape[1]):
            for query in range(queries):
                seen = [key for key in range(keys) if by_hand(mask, row, query, key)]
                if not seen:
                    out.append(torch.zeros(4, dtype=q.dtype))
                    continue
                scores = k[row, head // group, seen] @ q[row, head, query] / math.sqrt(4)
                out.append(torch.softmax(scores, 0) @ v[row, head // group, seen])
    return torch.stack(out).view(rows, q.shape[1], queries, 4)


@given(masks())
@settings(max_examples=100, deadline=None)
def test_the_mask_is_the_papers(mask: DFlashMask) -> None:
    rows, queries, keys = sizes(mask)
    seen = visible(mask)
    assert seen.shape == (rows, 1, queries, keys)
    expected = [[[by_hand(mask, r, q, k) for k in range(keys)] for q in range(queries)] for r in range(rows)]
    assert seen[:, 0].tolist() == expected


def test_a_small_mask_read_by_eye() -> None:
    """Two documents of three tokens and a padding token; blocks of two anchored at tokens 2 and 4, one empty."""
    mask = DFlashMask(torch.tensor([[0, 0, 0, 1, 1, 1, -1]]), torch.tensor([[2, 4, -1]]), block=2)
    rows = ["".join(".x"[int(cell)] for cell in row) for row in visible(mask)[0, 0]]
    assert rows == [
        "xx.....xx....",
        "xx.....xx....",
        "...x.....xx..",
        "...x.....xx..",
        ".............",
        ".............",
    ]


@given(masks(), st.sampled_from([(1, 1), (2, 1), (4, 2)]), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_dense_attention_and_its_gradients(mask: DFlashMask, heads: tuple[int, int], seed: int) -> None:
    q, k, v = inputs(mask, *heads, seed)
    out, expected = attend_dense(q, k, v, visible(mask)), attention_by_hand(q, k, v, mask)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    got = torch.autograd.grad((out * weight).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weight).sum() + 0 * (q.sum() + k.sum() + v.sum()), (q, k, v))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_block_gives_zero_and_no_nan(dtype: torch.dtype) -> None:
    mask = DFlashMask(torch.tensor([[0, 0, 0, -1]]), torch.tensor([[1, -1]]), block=2)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(mask, 4, 2, seed=0))
    out = attend_dense(q, k, v, visible(mask))
    out.float().square().sum().backward()
    assert out.dtype == dtype
    assert not out[:, :, 2:].any()
    assert out[:, :, :2].any()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert not q.grad[:, :, 2:].any()


@given(masks())
@settings(max_examples=30, deadline=None)
def test_flex_reads_the_same_rule(mask: DFlashMask) -> None:
    rows, queries, keys = sizes(mask)
    assert torch.equal(create_mask(rule(mask), rows, 1, queries, keys, device="cpu"), visible(mask))


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_tiles_are_those_of_the_rule(seed: int) -> None:
    """Counted from ranges, the tiles are exactly those that asking every query and key would give."""
    made = random.Random(seed)
    rows, context = made.randint(1, 2), made.randint(120, 700)
    blocks, block = made.randint(1, 40), made.choice([2, 7, 8, 16, 32])
    documents, anchors = [], []
    for _ in range(rows):
        cuts = sorted(made.sample(range(1, context), made.randint(0, 4)))
        ids = [sum(t >= cut for cut in cuts) for t in range(context)]
        padding = made.choice([0, 0, 30])
        documents.append(ids[: context - padding] + [-1] * padding)
        count = made.randint(0, blocks)
        anchors.append(sorted(made.sample(range(context - padding), count)) + [-1] * (blocks - count))
    mask = DFlashMask(torch.tensor(documents), torch.tensor(anchors), block, made.choice([None, block, 200]))
    asked = create_block_mask(rule(mask), rows, None, *sizes(mask)[1:], device="cpu")
    counted = block_mask(mask)
    assert counted.shape == asked.shape
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(counted, name + "_num_blocks"), getattr(asked, name + "_num_blocks")
        assert torch.equal(*counts)
        for row, tile in itertools.product(range(rows), range(counts[0].shape[-1])):
            lists = [getattr(m, name + "_indices")[row, 0, tile].tolist() for m in (counted, asked)]
            used = int(counts[0][row, 0, tile])
            assert lists[0][:used] == sorted(lists[1][:used])
            assert sorted(lists[0]) == list(range(len(lists[0])))  # what is unused is still a tile's number


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
def test_flex_attention_equals_dense(window: int | None) -> None:
    """Un-compiled, forward only: CPU has no more of flex_attention than that."""
    document = torch.tensor([[0] * 9 + [1] * 20 + [-1] * 3, [0] * 32])
    mask = DFlashMask(document, torch.tensor([[2, 11, 20, -1], [0, 7, 30, 31]]), block=4, window=window)
    q, k, v = (x.detach().float() for x in inputs(mask, 4, 2, seed=1))
    with torch.no_grad():
        out = attend_flex(q, k, v, block_mask(mask))
    torch.testing.assert_close(out, attend_dense(q, k, v, visible(mask)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has no backward on CPU")
@pytest.mark.parametrize("window", [None, 40])
def test_compiled_flex_equals_dense_on_cuda(window: int | None) -> None:
    """Forward and gradients, an empty block included, and one compile for all steps of a geometry."""
    flex = torch.compile(attend_flex, fullgraph=True, dynamic=False)
    for step in range(3):
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            lengths = [100 + step, 60, 96 - step]
            document = torch.repeat_interleave(torch.tensor([0, 1, -1]), torch.tensor(lengths))[None]
            anchors = torch.tensor([[step + 1, 50, 110, 140, -1]])
            mask = DFlashMask(document.cuda(), anchors.cuda(), block=16, window=window)
            q, k, v = (
                torch.randn(1, h, n, 64, device="cuda", requires_grad=True) for h, n in ((4, 80), (2, 336), (2, 336))
            )
            got, wanted = flex(q, k, v, block_mask(mask)), attend_dense(q, k, v, visible(mask))
            weight = torch.randn_like(got)
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
            assert not got[:, :, 64:].any()
            grads = torch.autograd.grad((got * weight).sum(), (q, k, v))
            expected = torch.autograd.grad((wanted * weight).sum(), (q, k, v))
            for one, other in zip(grads, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Inductor makes other code for a CPU")
@pytest.mark.parametrize(("rows", "context", "blocks", "block"), [(4, 3072, 512, 16), (1, 40_000, 1024, 32)])
def test_tiles_can_be_listed_in_compiled_code(rows: int, context: int, blocks: int, block: int) -> None:
    """Of the large shapes: a running sum compiled at the first and not at the second."""
    anchors = torch.stack([torch.randperm(context)[:blocks].sort().values for _ in range(rows)])
    mask = DFlashMask(torch.zeros(rows, context, dtype=torch.int64).cuda(), anchors.cuda(), block)
    listed = torch.compile(block_mask, fullgraph=True, dynamic=False)(mask)
    for name in ("kv", "full_kv", "q", "full_q"):
        for part in ("_num_blocks", "_indices"):
            assert torch.equal(getattr(listed, name + part), getattr(block_mask(mask), name + part))
