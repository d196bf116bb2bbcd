"""Engines on other machines: a node serves its engine to several fronts, a front has several nodes for engines.

Promises: nothing that a peer sends is decoded before it has proven itself; no clock of one machine is compared with
that of another.
"""
