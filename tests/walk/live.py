"""What runs in servers with all their guests, held against the table in docs/operations.md."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from quire_engine.demo import demo_model_path
from support.adapters import write_adapter
from support.processes import program_words
from support.workers import known
from walk.scene import HUGE, SCHEMA, Scene, chat, scene

# What an event loop runs that nobody has named: the program itself, and connections with their requests.
PROGRAM = (
    *("_serve", "_run", "_until", "Server.", "Listener.", "LifespanOn.", "RequestResponseCycle."),
    *("Semaphore.", "Event.", "Queue."),
)
ADAPTED, SECOND = "adapted", "second"
KINDS = ("several models", "API servers and replicas")


def without_row(kind: str) -> list[str]:
    """The threads, tasks and processes of such a server that have no row."""
    with TemporaryDirectory(prefix="walk-") as folder, scene([], *_flags(kind, Path(folder))) as server:
        asyncio.run(_use(server))
        return list(_missing(server))


def _flags(kind: str, folder: Path) -> tuple[str, ...]:
    adapter = write_adapter(folder / "adapter", demo_model_path())
    collector = ("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces")
    common = ("--enable-lora", "--kv-offload-dir", "{folder}/kv", *collector)
    if kind == KINDS[0]:
        models = folder / "models.yaml"
        models.write_text(
            "models:\n"
            f"- {{model: quire-demo, pinned: true, speculation: suffix, lora_modules: [{ADAPTED}={adapter}]}}\n"
            f"- {{model: quire-demo, served_model_name: [{SECOND}], quantization: int8}}\n"
        )
        return (*common, "--models", str(models), "--batch-dir", "{folder}/batches")
    events = '{"enable_kv_cache_events": true, "endpoint": "ipc://{folder}/events"}'
    several = ("--api-server-count", "2", "--replicas", "2", "--kv-events-config", events)
    return (*common, *several, "--lora-modules", f"{ADAPTED}={adapter}", "--speculation", "suffix")


async def _use(server: Scene) -> None:
    """Everything that begins a thread, a task or a process when it is first asked for."""
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    await server.post("/v1/chat/completions", chat(response_format=shape))
    await server.post("/v1/completions", {"model": ADAPTED, "prompt": "a", "max_tokens": 2})
    await server.post("/v1/completions", {"model": SECOND, "prompt": "a", "max_tokens": 2}, status={200, 404})
    await server.post("/tokenize", {"prompt": HUGE})


def _missing(server: Scene) -> Iterator[str]:
    main = psutil.Process(server.server.process.pid)
    for process in (main, *main.children(recursive=True)):
        words = program_words(process)
        if not words:
            continue  # it has ended meanwhile
        program = next((word for word in words if known("process", word)), "quire serve" if process is main else "")
        if not program:
            yield f"process {words}"
        if "planted_run.py" not in words:
            continue  # a worker of one script, which has no threads of its own
        threads, tasks = server.names(process.pid)
        yield from (f"{program}: thread {name}" for name in threads - {"MainThread"} if not known("thread", name))
        yield from (f"{program}: task {name}" for name in tasks if not known("task", name) and not _is_unnamed(name))


def _is_unnamed(name: str) -> bool:
    return name.startswith(PROGRAM)
