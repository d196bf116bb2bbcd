"""A tenant that ends what others use, or asks in values that look right: models that stay, strict names and numbers.

Promises: the server of two models is started by the row. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from e2e.served import Served
from hostile.row import Row
from hostile.two_tenants import ATTACKER, KEYS
from several.server import START_SECONDS

OPERATOR = "key-of-operator"
STAYS_SECONDS = 2.5  # a model that may go is looked at each second
MODELS = """models:
- {model: quire-demo, served_model_name: [one], idle_seconds: 600}
- {model: quire-demo, served_model_name: [two], idle_seconds: 600}
"""


async def keep_alive(_: Served) -> str:
    """Ollama's `keep_alive: 0` of a tenant leaves a model where it is; the operator's puts it away."""

    async def ask(http: httpx.AsyncClient, key: str, **more: object) -> None:
        body = {"model": "two", "keep_alive": 0, "stream": False, **more}
        reply = await http.post("/api/generate", json=body, headers={"authorization": f"Bearer {key}"})
        assert reply.status_code == 200, reply.text[:300]

    async def state(http: httpx.AsyncClient) -> str:
        rows: list[dict[str, Any]] = (await http.get("/admin/models")).json()["models"]
        return str(next(row["state"] for row in rows if row["model"] == "two"))

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        file.write_text(MODELS)
        flags = ("--models", str(file), *KEYS, "--admin-api-key", OPERATOR)
        small = ("--max-model-len", "256", "--kv-memory", "16MiB")
        served = Served(*flags, *small, start_seconds=START_SECONDS)
        with ExitStack() as ended:
            server = await asyncio.to_thread(ended.enter_context, served)
            headers = {"authorization": f"Bearer {OPERATOR}"}
            async with httpx.AsyncClient(base_url=server.url, timeout=120, headers=headers) as http:
                for more in ({"prompt": "a", "options": {"num_predict": 1}}, {}):  # a request, and the order to unload
                    await ask(http, ATTACKER, prompt="a", options={"num_predict": 1})
                    await ask(http, ATTACKER, **more)
                    ends = time.monotonic() + STAYS_SECONDS
                    while time.monotonic() < ends:
                        seen = await state(http)
                        assert seen == "loaded", f"a tenant's keep_alive of 0: the model is {seen}"
                        await asyncio.sleep(0.1)
    return "the model stays loaded, after a tenant's request and after its order to unload"


async def strict_values(server: Served) -> str:
    """A level that is no number, and names of adapters with a path's parts."""
    wrong = (
        ("/v1/load_lora_adapter", {"lora_name": "../x", "lora_path": "/nowhere"}),
        ("/v1/load_lora_adapter", {"lora_name": "a/../x", "lora_path": "/nowhere"}),
        ("/admin/sleep", {"model": "quire-demo", "level": True}),
        ("/admin/sleep", {"model": "quire-demo", "level": "1"}),
        ("/admin/sleep", {"model": "quire-demo", "level": 1.0}),
    )
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for path, body in wrong:
            reply = await http.post(path, json=body)
            assert reply.status_code == 400, f"{path} {body}: {reply.status_code} {reply.text[:200]}"
            told = reply.json()["error"]
            assert told["param"] in body, f"{path} {body}: {told}"
    return f"{len(wrong)} of {len(wrong)} are 400 and name the field"


ROWS = (
    Row(name="keep-alive", what="a tenant's keep_alive of 0", act=keep_alive),
    Row(
        name="strict-values",
        what="values that only look right",
        act=strict_values,
        flags=("--allow-local-admin", "--enable-lora"),
    ),
)
