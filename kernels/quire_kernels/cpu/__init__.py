"""The kernel set for CPUs: C++ compiled on first use, called through ctypes.

Promises: importing it compiles nothing; every row's result is bitwise independent of the rest of the call. Must not
know: the engine, the server, models.
"""
