"""A live server as the facts need it: completions of exact lengths, its metrics, the seconds of its dashboard.

Promises: prompts are token ids that no earlier prompt began with; a server that is busy is not measured.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from quire_bench.servers import BenchError

_PATIENCE = 120.0
_SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_FIRST_TOKENS = 64, 512  # ids that every vocabulary has, beyond the special ones
_NO_KEY = {http.client.UNAUTHORIZED, http.client.FORBIDDEN}


class Live:
    """One server, by its address."""

    def __init__(self, url: str, *, api_key: str = "", admin_key: str = "") -> None:
        parts = urlsplit(url)
        self._secure, self._netloc, self._prefix = parts.scheme == "https", parts.netloc, parts.path.rstrip("/")
        self.url, self.api_key = url.rstrip("/"), api_key
        self._keys = api_key, admin_key or api_key
        self._random = random.Random(time.time_ns())
        self._firsts: list[int] = []  # first tokens of the next prompts
        self.block_size = int(self.label("quire_cache_config_info", "block_size"))
        self.max_model_len = int(self.label("quire_model_info", "max_model_len"))

    # -- asking

    def request(
        self, method: str, path: str, body: object = None, *, admin: bool = False, request_id: str = ""
    ) -> http.client.HTTPResponse:
        """The reply, whose body is still to be read. Raises BenchError for other statuses than 200."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._netloc, timeout=_PATIENCE)
        key = self._keys[admin]
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        headers |= {"X-Request-Id": request_id} if request_id else {}
        try:
            connection.request(
                method, self._prefix + path, None if body is None else json.dumps(body).encode(), headers
            )
            reply = connection.getresponse()
        except OSError as error:
            raise BenchError(f"{self._netloc} does not answer: {error}") from None
        if reply.status != http.client.OK:
            hint = "; the operator's key is --admin-api-key" if admin and reply.status in _NO_KEY else ""
            said = reply.read(500).decode(errors="replace")
            raise BenchError(f"{method} {path} was answered {reply.status}: {said}{hint}")
        return reply

    def complete(self, prompt: Sequence[int], num_tokens: int, **options: object) -> dict[str, Any]:
        """Exactly so many tokens after the prompt; the reply, for which the connection is kept."""
        body = {"prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **options}
        reply: dict[str, Any] = json.load(self.request("POST", "/v1/completions", body))
        return reply

    def stream(
        self, prompt: Sequence[int], num_tokens: int, began: threading.Event, name: str = "", **options: object
    ) -> None:
        """Complete as a stream that tells when its first token is there; `name`: by which the server knows it."""
        body = {"prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True, "stream": True, **options}
        for _ in self.request("POST", "/v1/completions", body, request_id=name):
            began.set()

    def together(self, calls: Sequence[Callable[[], object]]) -> None:
        """All calls at once, until the last has returned."""
        with ThreadPoolExecutor(len(calls)) as pool:
            for future in [pool.submit(call) for call in calls]:
                future.result()

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt that nothing has in its cache: no other one of the last few hundred begins with the same token.

        Requests that begin alike, and are greedy, would share the blocks of their outputs.
        """
        if not self._firsts:
            self._firsts = self._random.sample(range(*_FIRST_TOKENS), _FIRST_TOKENS[1] - _FIRST_TOKENS[0])
        return [self._firsts.pop(), *(self._random.randrange(*_FIRST_TOKENS) for _ in range(num_tokens - 1))]

    # -- looking

    def debug(self, path: str) -> dict[str, Any]:
        """Read what the server tells its operator under /debug."""
        told: dict[str, Any] = json.load(self.request("GET", f"/debug/{path}", admin=True))
        return told

    def last_step(self) -> int:
        """The number of the last step that was planned."""
        return int(self.debug("steps?limit=1")["last"])

    def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        found = []
        for line in self.request("GET", "/metrics").read().decode().splitlines():
            if match := _SAMPLE.fullmatch(line):
                found.append((match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels; 0 of none."""
        return sum(
            value
            for found, told, value in self._samples()
            if found == name and all(told.get(label) == wanted for label, wanted in labels.items())
        )

    def label(self, name: str, label: str) -> str:
        """A label of a metric that describes. Raises BenchError where the server has none: it is not ours."""
        for found, told, _ in self._samples():
            if found == name and label in told:
                return told[label]
        raise BenchError(f"{self._netloc} has no metric {name}: is it a Quire server?")

    def gain(self, name: str, **labels: str) -> Callable[[], float]:
        """How much a counter has grown since now."""
        before = self.metric(name, **labels)
        return lambda: self.metric(name, **labels) - before

    def until_idle(self) -> None:
        """Wait until nothing runs. Raises BenchError where somebody else keeps the server busy."""
        deadline = time.monotonic() + _PATIENCE
        while self.metric("quire_requests_running") + self.metric("quire_requests_waiting"):
            if time.monotonic() > deadline:
                raise BenchError("the server has other work: facts are checked on one that has none")
            time.sleep(0.05)

    @contextmanager
    def watched(self, seconds_after: float = 1.2) -> Iterator[list[dict[str, Any]]]:
        """Collect what the dashboard is told meanwhile, second by second, and for the second after."""
        told: list[dict[str, Any]] = []
        reply = self.request("GET", "/dashboard/events", admin=True)
        began, over = threading.Event(), threading.Event()

        def read() -> None:
            for line in reply:
                if line.startswith(b"data: "):
                    message = json.loads(line[6:])
                    if began.is_set():
                        told.append(message["now"])
                    elif "now" in message:  # of a second that had begun before
                        began.set()
                if over.is_set():
                    return

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        began.wait(_PATIENCE)
        try:
            yield told
            time.sleep(seconds_after)
        finally:
            over.set()
            reading.join(3)
