"""Targets feed drafters: who does what, batches, bounded channels, workers, gradient averaging.

Who makes and who uses a batch is a matter of arithmetic (`layout`): no scheduler, the same order in every run,
and each (target, drafter) pair has a channel of its own with one writer and one reader.
"""
