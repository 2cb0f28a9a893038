"""A tokenised document, and where in it blocks may be anchored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PADDING = -1


@dataclass
class Document:
    """`tokens` int64 [n]; `loss_mask` bool [n], True on what the target would generate."""

    tokens: np.ndarray
    loss_mask: np.ndarray


def eligible_anchors(loss_mask: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Where a block may be anchored: bool [..., S] from loss_mask bool [..., S] and document int [..., S].

    An anchor is a supervised token whose successor is supervised too and of the same document, so that its
    block has at least one label.
    """
    eligible = np.zeros_like(loss_mask)
    eligible[..., :-1] = (
        loss_mask[..., :-1]
        & loss_mask[..., 1:]
        & (document[..., :-1] == document[..., 1:])
        & (document[..., :-1] != PADDING)
    )
    return eligible


def count_anchors(loss_mask: np.ndarray) -> int:
    """How many tokens of one document, loss_mask bool [n], are eligible."""
    return int((loss_mask[:-1] & loss_mask[1:]).sum())
