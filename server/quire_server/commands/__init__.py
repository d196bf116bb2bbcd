"""The commands of `quire`, one per file, and the table of their names.

Each has `run(argv)` and returns the exit code.
"""

from __future__ import annotations

# Name: (module, what it does). The packages on top, quire_bench and quire_lab, are named in this table and nowhere else
# below them: where one is missing, all other commands work.
COMMANDS = {
    "serve": ("quire_server.commands.serve", "serve a model over the OpenAI HTTP API"),
    "chat": ("quire_server.commands.chat", "talk to a running server in the terminal"),
    "engine": ("quire_server.commands.engine", "compute for servers on other machines: a node"),
    "run-batch": ("quire_server.commands.run_batch", "answer a file of requests without a server"),
    "bench": ("quire_bench.command", "put load on servers and say how fast they are"),
    "exercises": ("quire_lab.mine.command", "exercises by a live server, or for your own scheduler or block pool"),
    "eval-quant": ("quire_server.commands.eval_quant", "measure what int8 and int4 cost a model"),
    "calibrate": ("quire_lab.commands.calibrate", "measure what steps take on this machine, for simulate and plan"),
    "plan": ("quire_lab.commands.plan", "find settings for a load, and the memory of a KV cache"),
    "replay": ("quire_lab.commands.replay", "plan a recorded log again, as it was or with other settings"),
    "simulate": ("quire_lab.commands.simulate", "run a load through the scheduler without a machine"),
    "verify": ("quire_server.commands.verify", "check that this machine computes what it should"),
    "doctor": ("quire_lab.commands.doctor", "name the cause of a running server's bad latencies"),
    "build-kernels": ("quire_server.commands.build_kernels", "compile the CPU kernels now, not at the first start"),
    "pack": ("quire_server.commands.pack", "pack a model's weights now, not at the first start"),
    "trace": ("quire_lab.commands.trace", "tell what a running server's scheduler does, step by step, and why"),
    "config": ("quire_server.commands.config", "check settings without a start, or translate those of another server"),
    "completion": ("quire_server.commands.completion", "print what completes these words in bash, zsh or fish"),
    "health": ("quire_server.commands.health", "ask the server that runs here whether it takes requests"),
    "version": ("quire_server.commands.version", "print the version"),
}
