"""Answers of `quire serve` on a device, bit for bit what they must be: `python -m gpu_first.answers WHAT DEVICE`.

Promises: real servers over HTTP, as users start them; exit code 1 with both texts where two answers differ. Must not
know: how the engine computes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_bench.own_server import own_server
from quire_engine.demo import demo_model_path
from support.adapters import write_adapter

MODEL = "quire-demo"
TEXTS = (
    "Once upon a time there was a little",
    "The capital of France is",
    "A quire is",
    "She opened the door and saw that",
    "One, two, three,",
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "seed": 6},
    {"temperature": 0, "repetition_penalty": 1.2},
)
ANSWERS, TOKENS = 10, 48
MEMORY = ("--kv-memory", "256MiB")  # the part's other jobs have the rest of the device
Answer = dict[str, Any]


class Differs(AssertionError):
    """An answer is not what it must be; carries one line and both answers."""


def requests(count: int = ANSWERS, model: str = MODEL) -> list[Answer]:
    """Completions of prompts of several lengths, greedy and drawn."""
    return [
        {
            "model": model,
            "prompt": " ".join([TEXTS[i % len(TEXTS)]] * (1 + i % 7)),
            "max_tokens": TOKENS - i % 5,
            "ignore_eos": True,
            "logprobs": 2,
            **KINDS[i % len(KINDS)],
        }
        for i in range(count)
    ]


def post(url: str, path: str, body: Answer) -> bytes:
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as reply:
        return bytes(reply.read())


def complete(url: str, body: Answer) -> Answer:
    """A completion's choice: text, reason and log-probabilities."""
    return dict(json.loads(post(url, "/v1/completions", body))["choices"][0])


async def one_by_one(url: str, bodies: Sequence[Answer]) -> list[Answer]:
    return [await asyncio.to_thread(complete, url, body) for body in bodies]


async def at_once(url: str, bodies: Sequence[Answer]) -> list[Answer]:
    return list(await asyncio.gather(*(asyncio.to_thread(complete, url, body) for body in bodies)))


def hold(found: Sequence[Answer], expected: Sequence[Answer], what: str) -> None:
    """Raise Differs unless all answers are equal, log-probabilities included."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            raise Differs(f"answer {i} {what} differs:\n{json.dumps(ours)}\n{json.dumps(theirs)}")


async def metric(url: str, name: str) -> float:
    """The sum of a metric's values."""
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url + "/metrics", timeout=30).read().decode())
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def served(device: str, *flags: str, model: str = MODEL) -> Any:
    return own_server([model, "--device", device, "--deterministic", "--max-num-seqs", "64", *MEMORY, *flags])


async def start(device: str) -> str:
    """A server as users start it: seconds until it is ready, a completion, a stream, an embedding, JSON by a schema."""
    began = time.monotonic()
    async with own_server([MODEL, "--device", device, "--gpu-memory-utilization", "0.5"]) as url:
        ready = time.monotonic() - began
        (answer,) = await one_by_one(url, requests(1))
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        stream = await asyncio.to_thread(post, url, "/v1/chat/completions", {**chat, "stream": True})
        schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        formed = await asyncio.to_thread(post, url, "/v1/chat/completions", {**chat, "response_format": asked})
        vector = await asyncio.to_thread(post, url, "/v1/embeddings", {"model": MODEL, "input": "A quire is"})
        replaced = await metric(url, "quire_kernels_replaced")
        left_out = await metric(url, "quire_gpu_path_left_out")
    if not answer["text"] or not stream.rstrip().endswith(b"data: [DONE]"):
        raise Differs(f"no whole answer: {answer}, {stream!r}")
    if json.loads(json.loads(formed)["choices"][0]["message"]["content"])["a"] not in ("b", "c"):
        raise Differs(f"not of the schema: {formed!r}")
    if not any(json.loads(vector)["data"][0]["embedding"]):
        raise Differs("an embedding of zeros")
    if replaced:
        raise Differs(f"{replaced:g} operations were replaced by the reference's: they failed at the start")
    took = f"ready after {ready:.1f} s, {time.monotonic() - began:.1f} s in all"
    return f"{took}, {left_out:g} optional paths left out" if left_out else took


async def batch(device: str) -> str:
    """Ten answers alone have the bits that they have among 40 others."""
    bodies = requests(50)
    async with served(device) as url:
        alone = await one_by_one(url, bodies[:ANSWERS])
        together = await at_once(url, bodies)
    hold(together[:ANSWERS], alone, "in a batch of 50")
    return f"{ANSWERS} answers of {TOKENS} tokens equal, alone and among 50"


async def speculation(device: str) -> str:
    """Guessed tokens change no answer."""
    bodies = [{**body, "prompt": "one two three " * 12, "logprobs": None} for body in requests()]
    async with served(device) as url:
        plain = await one_by_one(url, bodies)
    async with served(device, "--speculation", "suffix") as url:
        guessed = await one_by_one(url, bodies)
        accepted = await metric(url, "vllm:spec_decode_num_accepted_tokens_total")
    hold(guessed, plain, "with guessed tokens")
    if not accepted:
        raise Differs("no guessed token was accepted: nothing was shown")
    return f"{ANSWERS} answers equal, {accepted:.0f} guessed tokens accepted"


async def adapters(device: str) -> str:
    """Requests with two adapters and without have the same bits at once as alone; adapters change answers."""
    with tempfile.TemporaryDirectory() as folder:
        places = {name: write_adapter(Path(folder, name), demo_model_path(), seed=i) for i, name in enumerate("ab")}
        modules = [f"{name}={place}" for name, place in places.items()]
        async with served(device) as url:
            base = await one_by_one(url, requests(6))
        async with served(device, "--enable-lora", "--max-loras", "2", "--lora-modules", *modules) as url:
            bodies = [body for name in (MODEL, *places) for body in requests(6, name)]
            alone = await one_by_one(url, bodies)
            together = await at_once(url, bodies)
    hold(together, alone, "at once")
    hold(alone[:6], base, "without an adapter")
    if alone[6:12] == base or alone[12:] in (base, alone[6:12]):
        raise Differs("an adapter changed nothing")
    return "18 answers of the model and two adapters equal, alone and at once"


WHAT = {"start": start, "batch": batch, "speculation": speculation, "adapters": adapters}


def main(argv: Sequence[str], known: Mapping[str, Callable[[str], Coroutine[Any, Any, str]]] = WHAT) -> int:
    """0: as it must be; 1: not so. The last line says what was found."""
    what, device = argv
    try:
        print(asyncio.run(known[what](device)))
    except Differs as error:
        first, _, rest = str(error).partition("\n")
        print(f"{rest}\n{first}" if rest else first)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
