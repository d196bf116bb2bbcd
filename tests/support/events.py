"""Reading server-sent events in tests: the framing itself is checked on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx

DONE = "[DONE]"


def parse_events(text: str) -> list[dict]:
    """The JSON of every event; the last one must be the end mark, comments are dropped."""
    assert text.endswith("\n\n")
    events = [event for event in text[:-2].split("\n\n") if not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    payloads = [event.removeprefix("data: ") for event in events]
    assert payloads[-1] == DONE
    assert DONE not in payloads[:-1]
    return [json.loads(payload) for payload in payloads[:-1]]


async def stream(client: httpx.AsyncClient, path: str, body: dict) -> list[dict]:
    """The events of a streamed reply."""
    reply = await client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_events(reply.text)


def text_of(event: dict) -> str:
    """The new text of an event with one choice."""
    [choice] = event["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


def choice_texts(events: list[dict]) -> dict[int, str]:
    """The whole text of each choice."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + text_of({"choices": [choice]})
    return texts


def finishes(events: list[dict]) -> dict[int, tuple[str, object]]:
    """Finish and stop reason of each choice; no choice may have two."""
    found: dict[int, tuple[str, object]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                assert choice["index"] not in found
                found[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until the condition holds."""
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - the condition is a test's, nobody signals it
            await asyncio.sleep(0.001)
