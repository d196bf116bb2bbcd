"""A batch of 10,000 lines over two `kill -9` of the server, held against direct requests: `make batch-test`.

Promises: expected and got are printed for each promise, with exit code 1 where one is broken."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from e2e.served import Served

MODEL = "quire-demo"
FLAGS = ("--max-num-seqs", "16", "--max-num-queued-reqs", "1024", "--max-connections", "4096", "--disable-access-log")
KILLS = 2
SLOWER = 1.3  # times the live requests' time to the first token without a batch, at most
LIVE = 120  # live requests of each measurement, one after the other
PAUSE = 0.1  # seconds between them
AT_ONCE = 32  # direct requests


def request(number: int) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me about the number {number}."}],
        "max_tokens": 4 + number % 29,
        "temperature": 1,
        "seed": number,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def completed(api: openai.OpenAI, batch_id: str) -> int:
    counts = api.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


async def direct(url: str, requests: list[dict[str, Any]]) -> dict[str, str]:
    """The answers of direct requests, by custom_id."""
    places, answers = asyncio.Semaphore(AT_ONCE), dict[str, str]()

    async def ask(client: httpx.AsyncClient, each: dict[str, Any]) -> None:
        async with places:
            reply = (await client.post(each["url"], json=each["body"])).raise_for_status()
            answers[each["custom_id"]] = reply.json()["choices"][0]["message"]["content"]

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(ask(client, each) for each in requests))
    return answers


def live_ttft(url: str, seed: int) -> list[float]:
    """Seconds to the first token of live requests, sorted."""
    times = []
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(LIVE):
            prompt = f"{seed} {number}: " + "Once upon a time there was a cat. " * 12
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
            began = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=body) as stream:
                stream.raise_for_status()
                first = None
                for line in stream.iter_lines():  # to the end, so that the connection is used again
                    if first is None and line.startswith("data: {"):
                        first = time.perf_counter() - began
                assert first is not None
                times.append(first)
            time.sleep(PAUSE)
    return sorted(times)


def p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20)[-1]


def run(num_lines: int, folder: Path) -> bool:
    requests = [request(number) for number in range(num_lines)]
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in requests))
    flags = ("--batch-dir", str(folder / "kept"), *FLAGS)
    batch_id, began, kills = "", time.monotonic(), 0
    alone: list[float] = []
    beside: list[float] = []
    while True:
        with Served(*flags) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120) as api:
            if not batch_id:
                live_ttft(server.url, 0)  # the first ones compile and warm up
                alone = live_ttft(server.url, 1)
                file = api.files.create(file=source, purpose="batch")
                batch_id = api.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                ).id
            if kills < KILLS:
                while completed(api, batch_id) < (kills + 1) * num_lines // (KILLS + 1):
                    time.sleep(0.05)
                os.kill(server.process.pid, signal.SIGKILL)
                server.process.wait()
                kills += 1
                print(f"kill -9 after {time.monotonic() - began:.0f} s", flush=True)
                continue
            beside = live_ttft(server.url, 2)
            was_under_way = api.batches.retrieve(batch_id).status == "in_progress"
            while (batch := api.batches.retrieve(batch_id)).status not in {"completed", "failed", "expired"}:
                time.sleep(0.2)
            print(f"{batch.status} after {time.monotonic() - began:.0f} s", flush=True)
            output = api.files.content(batch.output_file_id or "").text
            answers = asyncio.run(direct(server.url, requests))
            break
    lines = [json.loads(line) for line in output.splitlines()]
    got = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in lines}
    total = 0 if batch.usage is None else batch.usage.total_tokens
    ratio = p95(beside) / p95(alone)
    promises = [
        ("status", "completed", batch.status),
        ("lines in the output", num_lines, len(lines)),
        ("different lines in the output", num_lines, len(got)),
        ("lines with an error", 0, 0 if batch.request_counts is None else batch.request_counts.failed),
        ("tokens of the batch", sum(each["response"]["body"]["usage"]["total_tokens"] for each in lines), total),
        ("answers unlike direct requests", 0, sum(got.get(name) != text for name, text in answers.items())),
        ("the batch ran beside live requests", True, was_under_way),
    ]
    for what, expected, found in promises:
        print(f"{what}: expected {expected}, got {found}")
    print(
        f"p95 to the first token: expected at most {SLOWER} x {p95(alone) * 1e3:.1f} ms alone, got"
        f" {p95(beside) * 1e3:.1f} ms beside the batch, {ratio:.2f} x"
    )
    return ratio <= SLOWER and all(expected == found for _, expected, found in promises)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m batches", description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run(given.lines, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
