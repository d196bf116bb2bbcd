"""Processes of their own that measure with the engine's parts and answer in JSON.

Nothing that serves imports them.
"""
