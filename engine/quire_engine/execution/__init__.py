"""A plan computed: the batch as tensors, the model's layers, the KV pool's memory, the sampler.

Knows no request and no queue; torch lives here and in the tools.
"""
