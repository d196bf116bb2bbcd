"""Simulation: the serving scheduler, run against a cost model of its steps instead of a machine.

Standard library and `scheduling` only. Has no server, no tensors and no real clock.
"""
