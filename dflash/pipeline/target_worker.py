"""What a target worker does: features of its batches, in order, to all who use them."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from dflash.pipeline.batch import BatchSource
from dflash.pipeline.tools import Tools
from dflash.target import Target


def run_target(tools: Tools, number: int, target: Target, source: BatchSource) -> None:
    """Make the features of every batch that is this target's, once for all variants; raises Aborted when the run
    ends.
    """
    tools.announce("target", number, target.device)
    tools.strategy.setup_thread()
    layout, variants = tools.layout, tools.job.variants()
    for index in layout.made_by(number, min(tools.done.values()), tools.job.train.steps):
        began = time.perf_counter()
        batch = source.batch(index)
        with tools.strategy.quiet():
            features = target.features(
                batch.tokens.to(target.device),
                batch.document.to(target.device),
                batch.position.to(target.device),
            )
            if features.is_cuda:
                torch.cuda.current_stream(features.device).synchronize()
        batch = replace(batch, features=features, made=time.time(), seconds=time.perf_counter() - began)
        for worker, variant in zip(layout.users(index), layout.variants, strict=True):
            if layout.step_of(index) > tools.done[variant]:  # a variant may have been further when all were stopped
                anchored = source.anchored(batch, variants[variant].drafter.anchors)
                tools.channels[number, worker].put(anchored)
