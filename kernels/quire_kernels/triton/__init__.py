"""The kernel set for a GPU, in Triton: one op a file, with its device code and its launch.

Promises: imported only when a set is made, so that other kernel sets do not need Triton. `provider` and `pool` do not
import Triton. Must not know: the engine, the server, models.
"""
