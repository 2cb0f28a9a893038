"""Documents to rows: packing, what happens to long ones, order, resuming."""

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data import store
from dflash.data.document import Document, eligible_anchors
from dflash.data.rows import Rows, pack, pieces

ROW = 16
lengths = st.lists(st.integers(1, ROW), min_size=1, max_size=40)
long_lengths = st.lists(st.integers(2, 4 * ROW), min_size=1, max_size=12)
fitting = st.lists(st.integers(2, ROW), min_size=1, max_size=25)


@settings(deadline=None)
@given(lengths)
def test_packing_keeps_each_document_whole_and_once(sizes):
    rows = pack(sizes, ROW)
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    assert all(0 < sum(sizes[n] for n in row) <= ROW for row in rows)
    # Any-fit packings leave at most one row half empty.
    assert sum(sum(sizes[n] for n in row) <= ROW // 2 for row in rows) <= 1
    assert rows == pack(sizes, ROW)


def make_documents(sizes, seed=0):
    """Each with at least one place for an anchor."""
    rng = np.random.default_rng(seed)
    found = []
    for n in sizes:
        mask = rng.random(n) < 0.6
        mask[:2] = True
        found.append(Document(rng.integers(0, 50, n), mask))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Puts documents into a prepared folder."""

    def put(documents, embedding_rows=50) -> Path:
        path = tmp_path_factory.mktemp("rows")
        writer = store.Writer(path, embedding_rows)
        for line, document in enumerate(documents, start=1):
            assert writer.add(line, document)
        writer.finish(store.Source("made up", "0", "0", {}), "tokens", {})
        writer.close()
        return path

    return put


@settings(deadline=None)
@given(fitting, st.integers(0, 3))
def test_rows_hold_documents_as_they_were_and_padding_otherwise(folder, sizes, seed):
    documents = make_documents(sizes, seed)
    rows = Rows(folder(documents), ROW, "skip", seed)
    found = Counter()
    for at in range(len(rows)):
        row = rows.build(at)
        for array, kind in ((row.tokens, "i8"), (row.loss_mask, "?"), (row.document, "i8"), (row.position, "i8")):
            assert array.shape == (ROW,)
            assert array.dtype == kind
        assert (row.document[: row.length] >= 0).all()
        assert (row.document[row.length :] == -1).all()
        assert not row.loss_mask[row.length :].any()
        for number in range(row.document.max() + 1):
            here = row.document == number
            assert row.position[here].tolist() == list(range(here.sum()))
            found[(tuple(row.tokens[here]), tuple(row.loss_mask[here]))] += 1
    assert found == Counter((tuple(d.tokens), tuple(d.loss_mask)) for d in documents)


@settings(deadline=None)
@given(fitting, st.integers(0, 3), st.integers(0, 200))
def test_each_epoch_meets_every_row_once_and_an_index_is_enough_to_resume(folder, sizes, seed, start):
    rows = Rows(folder(make_documents(sizes)), ROW, "skip", seed)
    again = pickle.loads(pickle.dumps(rows))
    n = len(rows)

    def key(row):
        return row.tokens.tobytes() + row.document.tobytes()

    want = Counter(key(rows.build(at)) for at in range(n))
    for epoch in range(2):
        assert Counter(key(rows.row(epoch * n + at)) for at in range(n)) == want
    assert key(again.row(start)) == key(rows.row(start))


def test_epochs_and_seeds_differ_in_order(folder):
    path = folder(make_documents([ROW] * 30))

    def order(seed, epoch):
        rows = Rows(path, ROW, "skip", seed)
        return [rows.row(epoch * 30 + at).tokens.tobytes() for at in range(30)]

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_rows_travel_to_another_process_as_a_name_and_not_as_tokens(folder):
    rows = Rows(folder(make_documents([ROW] * 200)), ROW, "skip", 0)
    rows.row(0)  # opened
    assert len(pickle.dumps(rows)) < 1000
    assert pickle.loads(pickle.dumps(rows)).row(7).tokens.tolist() == rows.row(7).tokens.tolist()


@settings(deadline=None)
@given(long_lengths, st.integers(0, 3))
def test_long_documents_are_left_out_shortened_or_split(folder, sizes, seed):
    documents = make_documents(sizes, seed)
    path = folder(documents)
    opened = store.Documents(path)

    def of(too_long):
        found = pieces(opened, ROW, too_long)
        parts = [
            (opened.tokens[a : a + n].tolist(), opened.loss_mask[a : a + n].tolist())
            for a, n in zip(found.starts, found.lengths, strict=True)
        ]
        masks = [np.array(mask) for _, mask in parts]
        assert found.supervised.tolist() == [mask.sum() for mask in masks]
        assert found.eligible.tolist() == [eligible_anchors(m, np.zeros(len(m))).sum() for m in masks]
        return found, parts

    def slices(step):
        return [
            (document.tokens[a : a + ROW].tolist(), document.loss_mask[a : a + ROW].tolist())
            for document in documents
            for a in range(0, len(document.tokens), step)
        ]

    def anchored(parts):
        return [part for part in parts if eligible_anchors(np.array(part[1]), np.zeros(len(part[1]))).any()]

    long = sum(n > ROW for n in sizes)
    found, parts = of("skip")
    assert parts == [part for part, n in zip(slices(4 * ROW), sizes, strict=True) if n <= ROW]
    assert found.skipped["longer than a row"] == long
    found, parts = of("cut")
    assert parts == slices(4 * ROW)
    assert (found.cut, found.split, found.skipped) == (long, 0, {})
    found, parts = of("split")
    assert parts == anchored(slices(ROW))
    assert (found.cut, found.split) == (0, long)
    assert found.skipped["no place for an anchor"] == len(slices(ROW)) - len(parts)


def test_large_vocabularies_get_the_room_they_need(folder):
    for embedding_rows, size in ((65_536, 2), (65_537, 4)):
        document = Document(np.array([embedding_rows - 1, 0]), np.ones(2, dtype=bool))
        path = folder([document], embedding_rows)
        assert store.Documents(path).tokens.itemsize == size
        assert Rows(path, ROW, "skip", 0).row(0).tokens[:2].tolist() == [embedding_rows - 1, 0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 2)), min_size=1, max_size=30))
def test_eligible_anchors_agree_with_a_plain_loop(slots):
    loss_mask, document = np.array([m for m, _ in slots]), np.array([d for _, d in slots])
    want = [
        a + 1 < len(slots)
        and bool(loss_mask[a] and loss_mask[a + 1])
        and bool(document[a] == document[a + 1] and document[a] != -1)
        for a in range(len(slots))
    ]
    assert eligible_anchors(loss_mask, document).tolist() == want
    assert eligible_anchors(loss_mask[None], document[None])[0].tolist() == want
