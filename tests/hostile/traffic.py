"""What clients of all kinds send for a long time: streams, whole answers, chats with tools and schemas, vectors, and
those that leave, send nonsense or read slowly.

Promises: who sends the same gets the same, whoever else is there and whatever happened to the engine meanwhile.
Must not know: what is measured beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import httpx

from e2e.streams import stream
from hostile.case import Case, exchange
from hostile.detectors import Answered

SEEDS = 24  # different requests of each kind, so that answers can be compared
MODEL, OTHER_MODEL, ADAPTER = "first", "other", "adapted"  # names that the server has
BATCH_LINES = 4
_ENDED = {"completed", "failed", "expired", "cancelled"}
SLOW_BYTES = 64
SLOW_PAUSE = 0.05  # seconds
SLOW_READS = 40
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 12}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": _SCHEMA, "strict": True}}

# Shares of a hundred requests.
MIX = {
    "stream": 32,
    "whole": 16,
    "tools": 6,
    "schema": 5,
    "embedding": 5,
    "adapter": 6,
    "other model": 6,
    "ollama": 6,
    "batch": 1,
    "abort": 10,
    "bad": 5,
    "slow": 2,
}


class Traffic:
    """One mix. `clock` gives the seconds of the run, `bad` are cases that must be refused or served."""

    def __init__(self, http: httpx.AsyncClient, clock: Callable[[], float], bad: Sequence[Case], seed: int) -> None:
        self._http = http
        self._clock = clock
        self._bad = bad
        self._dice = random.Random(seed)
        self._golden: dict[tuple[str, int], object] = {}
        self._makers: dict[str, Callable[[int], Awaitable[tuple[int, object, bool]]]] = {
            "stream": self._stream,
            "whole": self._whole,
            "tools": self._tools,
            "schema": self._schema,
            "embedding": self._embedding,
            "adapter": partial(self._named, ADAPTER),
            "other model": partial(self._named, OTHER_MODEL),
            "ollama": self._ollama,
            "batch": self._batch,
        }

    async def one(self) -> Answered:
        """One request of the mix, drawn at random."""
        kind = self._dice.choices(list(MIX), list(MIX.values()))[0]
        number = self._dice.randrange(SEEDS)
        try:
            if kind == "abort":
                return await self._abort(number)
            if kind == "bad":
                return await self._nonsense()
            if kind == "slow":
                return await self._slow(number)
            status, said, retry_after = await self._makers[kind](number)
        except httpx.HTTPError as error:
            return Answered(kind=kind, at=self._clock(), status=0, fault=f"{type(error).__name__}: {error}"[:200])
        fault = ""
        if status == 200 and self._golden.setdefault((kind, number), said) != said:
            fault = f"request {number} is answered otherwise than the first time"
        elif status not in {200, 429} and status < 500:
            fault = f"status {status}"
        return Answered(kind=kind, at=self._clock(), status=status, fault=fault, retry_after=retry_after)

    async def probe(self) -> float:
        """How long a small request takes, in seconds."""
        before = self._clock()
        body = {"prompt": "7, 8, 9,", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        (await self._http.post("/v1/completions", json=body)).raise_for_status()
        return self._clock() - before

    async def _stream(self, number: int) -> tuple[int, object, bool]:
        seen = await stream(self._http, _completion(number))
        said = seen.text if seen.done and not seen.errors else f"broken: {seen.errors}"
        return seen.status, said, "retry-after" in seen.headers

    async def _whole(self, number: int) -> tuple[int, object, bool]:
        return await self._post("/v1/completions", _completion(number), lambda value: value["choices"][0]["text"])

    async def _tools(self, number: int) -> tuple[int, object, bool]:
        body = _chat(number) | {"tools": [_TOOL], "tool_choice": "required"}
        return await self._post("/v1/chat/completions", body, _called)

    async def _schema(self, number: int) -> tuple[int, object, bool]:
        schema = _SCHEMA | {"title": f"form {number}"}  # another grammar to the server, the same to the model
        body = _chat(number) | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        return await self._post("/v1/chat/completions", body, _content)

    async def _embedding(self, number: int) -> tuple[int, object, bool]:
        body = {"input": [f"text {number}", "another"]}
        return await self._post("/v1/embeddings", body, lambda value: json.dumps(value["data"]))

    async def _named(self, model: str, number: int) -> tuple[int, object, bool]:
        """As `_whole`, of an adapter or another model."""
        body = _completion(number) | {"model": model}
        return await self._post("/v1/completions", body, lambda value: value["choices"][0]["text"])

    async def _ollama(self, number: int) -> tuple[int, object, bool]:
        options = {"temperature": 0, "num_predict": 8 + number, "seed": number}
        body = {"model": MODEL, "prompt": f"Number {number} is", "stream": False, "options": options}
        return await self._post("/api/generate", body, lambda value: value["response"])

    async def _batch(self, number: int) -> tuple[int, object, bool]:
        """A file of a few requests, its answers by their ids, and nothing that is left of it."""
        lines = [
            {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": _completion(number + i)}
            for i in range(BATCH_LINES)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = await self._http.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"})
        if file.status_code != 200:
            return file.status_code, None, "retry-after" in file.headers
        asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        reply = await self._http.post("/v1/batches", json=asked)
        while reply.status_code == 200 and reply.json()["status"] not in _ENDED:
            await asyncio.sleep(0.5)
            reply = await self._http.get(f"/v1/batches/{reply.json()['id']}")
        if reply.status_code != 200:
            return reply.status_code, None, "retry-after" in reply.headers
        return 200, await self._answers(reply.json()), False

    async def _answers(self, batch: dict[str, Any]) -> object:
        """Each line's text, or its error; the files are deleted."""
        said: dict[str, object] = {"status": batch["status"]}
        for key in ("output_file_id", "error_file_id"):
            if batch.get(key):
                content = (await self._http.get(f"/v1/files/{batch[key]}/content")).text
                for line in map(json.loads, content.splitlines()):
                    body = (line["response"] or {}).get("body", {})
                    said[line["custom_id"]] = body["choices"][0]["text"] if "choices" in body else line["error"] or body
        for key in ("input_file_id", "output_file_id", "error_file_id"):
            if batch.get(key):
                await self._http.delete(f"/v1/files/{batch[key]}")
        return said

    async def _abort(self, number: int) -> Answered:
        """Some leave before the answer begins, some in the middle, streamed and not."""
        dice = self._dice.random()
        if dice < 0.5:
            await stream(self._http, _completion(number), drop_after=self._dice.choice((0, 1, 5)))
        else:
            asked = self._http.post("/v1/completions", json=_completion(number))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked, self._dice.uniform(0.001, 0.2))
        return Answered(kind="abort", at=self._clock(), status=499)

    async def _nonsense(self) -> Answered:
        case = self._dice.choice(self._bad)
        url = self._http.base_url
        answer = await exchange(url.host, url.port or 80, case)
        fault = "" if answer.status in {*case.expected, 429, 503} else f"{case.name}: {answer.status}"
        return Answered(kind="bad", at=self._clock(), status=answer.status or 400, fault=fault, had_deadline=True)

    async def _slow(self, number: int) -> Answered:
        """A reader that takes a few bytes at a time, and leaves in the end."""
        url = self._http.base_url
        body = json.dumps(_completion(number) | {"stream": True}).encode()
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=SLOW_BYTES)
        try:
            head = "".join(
                f"{name}: {value}\r\n" for name, value in self._http.headers.items() if name == "authorization"
            )
            start = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}Content-Type: application/json\r\n"
            # Without "close" a short answer would leave this client waiting until the idle connection is ended.
            writer.write(f"{start}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(SLOW_READS):
                if not await reader.read(SLOW_BYTES):
                    break
                await asyncio.sleep(SLOW_PAUSE)
        except OSError:
            pass  # it may be cut off for its slowness
        finally:
            writer.close()
        return Answered(kind="slow", at=self._clock(), status=499)

    async def _post(self, path: str, body: dict[str, Any], take: Callable[[Any], object]) -> tuple[int, object, bool]:
        reply = await self._http.post(path, json=body)
        said = take(reply.json()) if reply.status_code == 200 else None
        return reply.status_code, said, "retry-after" in reply.headers


def _completion(number: int) -> dict[str, Any]:
    """Of very different lengths, half of them greedy."""
    return {
        "prompt": f"{number}, {number + 1}, " * (1 + number * 7 % 60),
        "max_tokens": 8 + number * 37 % 160,
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
    }


def _chat(number: int) -> dict[str, Any]:
    question = f"What is the weather in city number {number}?"
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 60, "temperature": 0, "seed": number}


def _content(value: Any) -> object:
    return value["choices"][0]["message"]["content"]


def _called(value: Any) -> object:
    """Without the ids of calls, which are drawn anew."""
    return [call["function"] for call in value["choices"][0]["message"]["tool_calls"] or ()]
