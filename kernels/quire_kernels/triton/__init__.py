"""The kernel set for a GPU, in Triton: one op a file, each the device code and what launches it.

Promises: imported only where a set is made, so that nothing else needs triton; but for `provider` and `pool`, which do
without it. Must not know: the engine, the server, models.
"""
