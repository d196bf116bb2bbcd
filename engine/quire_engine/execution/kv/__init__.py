"""The memory of keys and values: the pool, its rows, a pool that survives its process, and blocks in files."""
