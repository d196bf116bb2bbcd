"""Attention by a library of flash attention, for a kernel set with its own other ops.

Promises: a library is imported only when it is requested. Must not know: the engine, the server, models.
"""
