"""A server of three models with room for two, and what its operator sees of it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from e2e.served import Served

NAMES = ("alpha", "beta", "gamma")
FORMS = ("", "quantization: int8", "quantization: int4")  # other bits, so that a model's answers are its own
FLAGS = ("--max-model-len", "512", "--kv-memory", "16MiB", "--max-connections", "4096", "--disable-access-log")
FLAGS += ("--allow-local-admin",)
START_SECONDS = 240.0  # the plans of three models are made first, by a process that loads all libraries
ROUNDING = 2 << 20  # a plan estimates what a model takes; no weights fit in here


@contextmanager
def three_models(*flags: str, turn: float = 3.0, room_for: int = 2) -> Iterator[Served]:
    """The embedded model in three forms. There is room for two loaded ones, and for no weights beside them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        entries = zip(NAMES, FORMS, strict=True)
        lines = [f"- {{model: quire-demo, served_model_name: [{name}], {form}}}" for name, form in entries]
        file.write_text("models:\n" + "\n".join(lines) + "\n")
        given = ("--models", str(file), *FLAGS, *flags)
        with Served(*given, start_seconds=START_SECONDS) as first:
            sizes = sorted(row["loaded_bytes"] for row in rows(first))
        budget = str(sum(sizes[-room_for:]) + ROUNDING)
        turns = f"model_turn={turn}"
        with Served(*given, "--model-memory", budget, limits=turns, start_seconds=START_SECONDS) as server:
            yield server


def rows(server: Served) -> list[dict[str, Any]]:
    """Where each model is."""
    return list(httpx.get(server.url + "/admin/models", timeout=60).json()["models"])


def row(server: Served, name: str) -> dict[str, Any]:
    return next(each for each in rows(server) if each["model"] == name)


def order(server: Served, what: str, name: str, **more: object) -> httpx.Response:
    return httpx.post(f"{server.url}/admin/{what}", json={"model": name, **more}, timeout=300)


async def reached(
    server: Served, name: str, is_there: Callable[[dict[str, Any]], bool], seconds: float = 120
) -> dict[str, Any]:
    """The model's row once it is as wanted."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http, asyncio.timeout(seconds):
        while True:
            told = (await http.get("/admin/models")).json()["models"]
            found: dict[str, Any] = next(each for each in told if each["model"] == name)
            if is_there(found):
                return found
            await asyncio.sleep(0.003)


def untruths(server: Served) -> list[str]:
    """What the server tells of itself and is not so: health, states, memory. Two looks, since a state may change."""
    found: list[str] = []
    for _ in range(20):
        before, listed = rows(server), httpx.get(server.url + "/v1/models", timeout=60).json()["data"]
        health = {
            path: httpx.get(server.url + path, timeout=60).status_code for path in ("/health/live", "/health/ready")
        }
        after = rows(server)
        if [(each["state"], each["pid"]) for each in before] != [(each["state"], each["pid"]) for each in after]:
            time.sleep(0.05)
            continue
        found = [f"{path} is {status}" for path, status in health.items() if status != 200]
        for each in after:
            runs = each["pid"] is not None and _runs(each["pid"])
            if (each["state"] == "loaded") != runs and each["state"] not in {"loading", "unloading", "restarting"}:
                found.append(f"{each['model']} is {each['state']}, its process {'runs' if runs else 'does not run'}")
            states = {model["state"] for model in listed if model["id"] == each["model"]}
            if states != {each["state"]}:
                found.append(f"/v1/models says {states} of {each['model']}, /admin/models {each['state']}")
            own = httpx.get(f"{server.url}/health/ready?model={each['model']}", timeout=60).status_code
            if (own == 200) != (each["state"] == "loaded"):
                found.append(f"/health/ready of {each['model']} is {own}, and it is {each['state']}")
        if not found:
            break
        time.sleep(0.1)
    told = httpx.get(server.url + "/admin/models", timeout=60).json()
    if told["memory_bytes"] > told["budget_bytes"]:
        found.append(f"{told['memory_bytes']} bytes are taken of {told['budget_bytes']}")
    return found


def _runs(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
