"""Clients that write into logs and metrics: line ends, other people's ids, ever new names.

Promises: each row's figures are printed, kept or broken. Must not know: other rows.
"""

from __future__ import annotations

import json
import re

import httpx

from e2e.served import Served
from hostile.case import Case, exchange, request
from hostile.hygiene import faults
from hostile.row import Row

NAMES = 2000
MOST_GROWTH = 1.05
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


async def injection(server: Served) -> str:
    """Two thousand methods, paths, models and ids: the log stays one object a line, the metrics stay as many."""
    address = httpx.URL(server.url)
    forged = '%0a{"level":"error","message":"forged"}'

    async def send(raw: bytes, path: str) -> None:
        case = Case(kind="", name="", path=path, parts=lambda: (raw,))
        answer = await exchange(address.host, address.port or 80, case)
        wrong = list(faults(answer, path="/", sent=(path,))) if answer.status >= 400 else []
        assert not wrong, (raw[:80], wrong)

    async def round_of(number: int) -> None:
        body = json.dumps({"model": f"model-{number}\n\x1b[2J", "prompt": "a"}).encode()
        await send(request(f"BREW{number}", "/"), "/")
        await send(request("GET", f"/nothing-{number}{forged}"), f"/nothing-{number}")
        await send(request("POST", "/v1/completions", body, headers=[f"X-Request-Id: id-{number}"]), "/v1/completions")
        await send(request("GET", f"/v1/models/model-{number}", headers=["User-Agent: a\tforged"]), "/v1/models")

    async with httpx.AsyncClient(base_url=server.url) as http:
        await round_of(-1)
        before = len((await http.get("/metrics")).content)
        for number in range(NAMES // 4):
            await round_of(number)
        after = len((await http.get("/metrics")).content)
    lines = server.log().splitlines()
    broken = [line for line in lines if not _is_json(line)]
    figures = f"{NAMES} requests, {len(lines)} lines of log, metrics {before} -> {after} bytes"
    assert not broken, f"{figures}: {broken[0][:200]!r} is no object"
    assert not [line for line in lines if json.loads(line).get("message") == "forged"], figures
    assert after < before * MOST_GROWTH, figures
    return figures


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict) and not _CONTROL.search(line)
    except ValueError:
        return False


ROWS = (Row(name="injection", what="names that are lines of a log", act=injection, flags=("--log-format", "json")),)
