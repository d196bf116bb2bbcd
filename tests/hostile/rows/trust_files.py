"""Adapters whose files or paths are made to end or to hold up whoever reads them: 400 each, and the engine goes on.

Promises: what is planted lies in a temporary folder. Must not know: other rows.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from e2e.served import Served
from e2e.streams import client
from hostile.row import Row
from support.adapters import write_adapter

DEMO = Path(__file__).parents[3] / "engine" / "quire_engine" / "demo" / "quire-demo"
MOST_SECONDS = 30.0  # for one refusal, on a busy machine


def _configured(**keys: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))

    return change


def _pipe(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _endless(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/dev/zero")


PLANTED: dict[str, Callable[[Path], object]] = {
    "alpha": _configured(lora_alpha=1e308),
    "digits": _configured(lora_alpha=10**400),
    "pattern": _configured(alpha_pattern={"q_proj": 1e300}),
    "pipe": _pipe("adapter_config.json"),
    "weights-pipe": _pipe("adapter_model.safetensors"),
    "endless": _endless,
    "deep": lambda folder: (folder / "adapter_config.json").write_text("[" * 200_000),
}


async def planted(server: Served) -> str:
    slowest, engine = 0.0, server.engine().pid
    with tempfile.TemporaryDirectory() as place:
        paths = {name: write_adapter(Path(place) / name, DEMO) for name in PLANTED}
        for name, change in PLANTED.items():
            change(paths[name])
        names = ["x" * 256, "x" * 4000, "nul\0byte", "/dev", "~nobody/x", *(str(path) for path in paths.values())]
        async with client(server.url) as http:
            for path in names:
                started = time.monotonic()
                try:
                    reply = await http.post(
                        "/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": path}, timeout=MOST_SECONDS
                    )
                except httpx.TransportError as error:
                    raise AssertionError(f"{path[-60:]!r}: {type(error).__name__}") from None
                assert reply.status_code == 400, f"{path[-60:]!r}: {reply.status_code} {reply.text[:200]}"
                slowest = max(slowest, time.monotonic() - started)
            good = write_adapter(Path(place) / "good", DEMO)
            reply = await http.post("/v1/load_lora_adapter", json={"lora_name": "good", "lora_path": str(good)})
            assert reply.status_code == 200, reply.text[:200]
    assert server.engine().pid == engine, "the engine was replaced"
    return f"{len(names)} adapters refused, the slowest after {slowest * 1000:.0f} ms; the engine went on"


ROWS = (
    Row(
        name="planted-adapters",
        what="adapters with endless numbers, pipes, devices and impossible paths",
        act=planted,
        flags=("--enable-lora", "--max-num-seqs", "8", "--kv-memory", "32MiB"),
    ),
)
