"""Checkpoints and the decoders made of them: configuration, weights, layers.

Calls kernels and is called by the runner; knows nothing above it.
"""
