"""The kernel set for a GPU, in Triton: one op a file, each the device code and what launches it.

Promises: imported only where a set is made, so that nothing else needs triton.
Must not know: the engine, the server, models, the environment.
"""
