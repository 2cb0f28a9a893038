"""The harness: a matrix of settings becomes runs, each a process of its own, each with a verdict.

Knows a workload only by its spec, its events and its exit status. Never imports torch.
"""
