"""Routing: the replica that serves a request, chosen by its predicted time to first token.

Standard library and the files at the top of the engine only: a fleet is simulated with what a front serves with.
"""
