"""Attention by a library of flash attention, for a kernel set that computes all else itself.

Promises: no library is imported before it was asked for. Must not know: the engine, the server, models.
"""
