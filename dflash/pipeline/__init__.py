"""Targets feed drafters: batches, bounded channels, workers, gradient averaging.

Batch b is made by target b mod T and used by drafter b mod D, so who does what is a matter of arithmetic: no
scheduler, the same order in every run, and each (target, drafter) pair has a channel of its own with one
writer and one reader.
"""
