"""Blocks against a brute-force reading of the paper's definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.blocks import acceptance_lengths, coverage, gamma_for, make_blocks, sample_anchors

MASK = 7


@st.composite
def rows(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """A packed row of a few documents with padding, and a loss mask."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    padding = draw(st.integers(0, 4))
    size = sum(lengths) + padding
    document = np.concatenate([np.full(n, i) for i, n in enumerate(lengths)] + [np.full(padding, -1)])
    position = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(padding)])
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size))) & (document >= 0)
    return {
        "tokens": np.arange(100, 100 + size),
        "loss_mask": mask,
        "document": document.astype(np.int64),
        "position": position.astype(np.int64),
    }


@given(rows(), st.integers(2, 6), st.integers(1, 6), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_blocks_match_the_definition_slot_by_slot(row, block, num_anchors, seed):
    anchors = sample_anchors(row["loss_mask"], row["document"], num_anchors, (seed,))
    tensors = {k: torch.from_numpy(v)[None] for k, v in row.items()}
    gamma = gamma_for(block)
    got = make_blocks(**tensors, anchors=torch.from_numpy(anchors)[None], block=block, mask_token=MASK, gamma=gamma)
    size = len(row["tokens"])
    for i, a in enumerate(anchors):
        for k in range(block):
            q = i * block + k
            t = a + k
            if a < 0:
                assert got.inputs[0, q] == MASK
                assert got.weight[0, q] == 0
                continue
            assert got.inputs[0, q] == (row["tokens"][a] if k == 0 else MASK)
            assert got.position[0, q] == row["position"][a] + k
            same = t < size and row["document"][t] == row["document"][a]
            if k >= 1 and same and row["loss_mask"][t]:
                assert got.weight[0, q].item() == pytest.approx(math.exp(-(k - 1) / gamma), rel=1e-6)
                assert got.labels[0, q] == row["tokens"][t]
            else:
                assert got.weight[0, q] == 0


@given(rows(), st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_anchors_are_distinct_sorted_eligible_and_as_many_as_there_are(row, num_anchors, seed):
    mask, document = row["loss_mask"], row["document"]
    anchors = sample_anchors(mask, document, num_anchors, (seed, 1))
    eligible = [
        a
        for a in range(len(mask) - 1)
        if mask[a] and mask[a + 1] and document[a] == document[a + 1] and document[a] >= 0
    ]
    full = anchors[anchors >= 0]
    assert len(anchors) == num_anchors
    assert len(full) == min(num_anchors, len(eligible))
    assert list(full) == sorted(set(full.tolist()))
    assert set(full.tolist()) <= set(eligible)
    assert (anchors[len(full) :] == -1).all()
    assert (anchors == sample_anchors(mask, document, num_anchors, (seed, 1))).all()


@given(rows(), st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_documents_share_a_rows_anchors_as_equally_as_they_can(row, num_anchors, seed):
    mask, document = row["loss_mask"], row["document"]
    everything = sample_anchors(mask, document, len(mask), (0,))
    available = np.bincount(document[everything[everything >= 0]], minlength=4)
    anchors = sample_anchors(mask, document, num_anchors, (seed,))
    shares = np.bincount(document[anchors[anchors >= 0]], minlength=4)
    assert shares.sum() == min(num_anchors, available.sum())
    assert (shares <= available).all()
    # Nobody who could take more has less than anybody else, but for the rest that does not divide.
    for one in np.flatnonzero(shares < available):
        assert shares[one] >= shares.max() - 1


@given(rows(), st.integers(2, 6), st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_coverage_counts_the_supervised_tokens_that_are_some_slots_label(row, block, num_anchors, seed):
    anchors = sample_anchors(row["loss_mask"], row["document"], num_anchors, (seed,))
    tensors = {k: torch.from_numpy(v)[None] for k, v in row.items()}
    got = make_blocks(**tensors, anchors=torch.from_numpy(anchors)[None], block=block, mask_token=MASK, gamma=4.0)
    labels = {int(token) for token in got.labels[got.weight > 0]}  # tokens of these rows are all different
    want = len(labels), int(row["loss_mask"].sum())
    assert coverage(row["loss_mask"], row["document"], anchors, block) == want


def test_short_documents_are_not_starved_by_a_long_one():
    document = np.repeat([0, 1, 2], [200, 10, 10])
    mask = np.ones(220, dtype=bool)
    for seed in range(20):
        anchors = sample_anchors(mask, document, 32, (seed,))
        assert np.bincount(document[anchors]).tolist() == [14, 9, 9]


def test_every_eligible_position_is_drawn_about_equally_often():
    mask = np.ones(12, dtype=bool)
    document = np.repeat([0, 1], 6)
    counts = np.zeros(12)
    for seed in range(3000):
        anchors = sample_anchors(mask, document, 3, (seed,))
        counts[anchors] += 1
    eligible = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert counts[5] == counts[11] == 0  # the last token of a document has no successor to predict
    assert np.allclose(counts[eligible] / counts.sum(), 0.1, atol=0.015)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_acceptance_length_is_one_plus_the_run_of_right_labelled_slots(data):
    num, block = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 6))
    size = num * block
    correct = torch.tensor([data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))])
    expected = []
    for i in range(num):
        run = 0
        while run + 1 < block and correct[0, i * block + run + 1]:
            run += 1
        expected.append(1.0 + run)
    assert acceptance_lengths(correct, block).tolist() == [expected]


def test_the_papers_decay_and_its_mean_over_a_block():
    # Means of exp(-(k-1)/gamma) over k = 1..B-1: 0.442 for (7, 16), 0.534 for (4, 8).
    for block, gamma, mean in ((16, 7.0, 0.442), (8, 4.0, 0.534)):
        assert gamma_for(block) == gamma
        tokens = torch.arange(40)[None]
        zero = torch.zeros_like(tokens)
        got = make_blocks(
            tokens,
            torch.ones_like(tokens, dtype=torch.bool),
            zero,
            tokens,
            torch.tensor([[3]]),
            block=block,
            mask_token=MASK,
            gamma=gamma,
        )
        assert (got.weight.sum() / (block - 1)).item() == pytest.approx(mean, abs=5e-4)
