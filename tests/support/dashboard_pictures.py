"""Takes the two pictures of the dashboard in the README: `PYTHONPATH=tests python -m support.dashboard_pictures`.

A server with the embedded model answers three to twelve chats at once, more and less in turns, for five minutes. What a
headless Chromium shows then, down to the second row of charts, is written to `docs/dashboard-{light,dark}.png`.
"""

from __future__ import annotations

import io
import math
import random
import sys
import threading
import time
from contextlib import ExitStack

import httpx
from PIL import Image

from e2e.served import Served
from support.browser import Browser
from support.documents import ROOT

WIDTH, COLOURS = 1400, 64
SECONDS, WAVE = 300.0, 120.0  # of load before the pictures are taken; between two ebbs of it
EBB, FLOOD = 3, 12  # chats at once
SYSTEM = "You are a patient teacher. You answer in short sentences, and you say so when you do not know. " * 2
QUESTIONS = ("Tell me a short story.", "What is the capital of Japan?", "How are you today?", "Tell me about rivers.")


def chat(url: str, drawn: random.Random) -> None:
    """One streamed chat behind the system prompt that all share, read to its end."""
    said = f"{drawn.choice(QUESTIONS)} I am number {drawn.randrange(1000)}."
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}],
        **{"max_tokens": drawn.randrange(500, 1700), "ignore_eos": True, "temperature": 0.8, "stream": True},
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as reply:
        for _ in reply.iter_lines():
            pass


def work(url: str, over: threading.Event) -> None:
    """As many chats at once as the hour asks for, until it is over."""
    drawn, began = random.Random(0), time.monotonic()
    chats: list[threading.Thread] = []
    while not over.wait(0.2):
        wanted = EBB + (FLOOD - EBB) * (1 - math.cos(2 * math.pi * (time.monotonic() - began) / WAVE)) / 2
        chats = [one for one in chats if one.is_alive()]
        if len(chats) < wanted:
            chats.append(threading.Thread(target=chat, args=(url, random.Random(drawn.random()))))
            chats[-1].start()
    for one in chats:
        one.join()


def take(page: Browser) -> Image.Image:
    """The page's upper part, in few colours."""
    with io.BytesIO(page.picture()) as png:
        bottom = page.run("document.getElementById('itl').closest('section').getBoundingClientRect().bottom")
        picture = Image.open(png).convert("RGB")
    return picture.crop((0, 0, picture.width, round(bottom) + 16)).quantize(COLOURS, dither=Image.Dither.NONE)


def main() -> int:
    over = threading.Event()
    with ExitStack() as stack:
        server = stack.enter_context(Served("--max-num-seqs", "12", "--kv-memory", "24MiB"))
        pages = {
            scheme: stack.enter_context(Browser(width=WIDTH, dark=scheme == "dark")) for scheme in ("light", "dark")
        }
        working = threading.Thread(target=work, args=(server.url, over))
        working.start()
        time.sleep(SECONDS)
        for page in pages.values():
            page.open(server.url + "/dashboard")
            page.until("document.getElementById('state').textContent === 'Live.'")
        time.sleep(2)
        for scheme, page in pages.items():
            take(page).save(ROOT / "docs" / f"dashboard-{scheme}.png", optimize=True)
        over.set()
        working.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
