"""The scheduler that serves, run against a model of what steps take instead of a machine: what would happen if.

Standard library and `scheduling` only. Knows no server, no tensors and no real clock.
"""
