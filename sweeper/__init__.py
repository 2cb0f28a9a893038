"""The harness: expands a matrix of settings into runs, starts each as a process of its own, says what came of it.

Knows a workload only by its spec, its events and its exit status. Never imports torch.
"""
