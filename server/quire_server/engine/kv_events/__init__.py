"""Events of an engine's KV cache for routers of others, in vLLM's format.

`publisher` is loaded where it is asked for: it alone needs pyzmq.
"""
