"""Watches the engine for the page /learn: asks it some times a second while a page is open, and never otherwise.

Promises: without a viewer nothing is asked or paused; every viewer gets every step, unless the engine makes more
between two questions than one answer holds. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from quire_engine.contract.errors import QuireError
from quire_engine.contract.types import PACE
from quire_server.background import begin
from quire_server.learning.exercises import Progress

LOOK_SECONDS = 0.1  # between two questions
TELL_SECONDS = 1.0  # between two messages at least, and between two repetitions of an order
MOST_VIEWERS = 8
MOST_STEPS = 256  # in one answer
_MOST_PAST = 64  # steps for a new viewer
_MOST_QUEUED = 32  # messages for a viewer that does not read
_RUN = {"mode": "run", "seconds": 0.0, "steps_left": 0}


class Names(Protocol):
    """The clients' names of requests."""

    def name(self, request_id: str) -> str | None: ...


class Asked(Protocol):
    """The engines, of which the watch needs these."""

    async def inspect(self, what: str, argument: str) -> bytes: ...
    async def control(self, what: str, argument: str) -> bytes: ...


class Watch:
    """The view of all viewers, by one question for all. Used on the event loop's thread."""

    def __init__(self, asked: Asked, names: Names) -> None:
        """`names`: the clients' names of requests."""
        self._asked, self._names = asked, names
        self._viewers: list[asyncio.Queue[bytes]] = []
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._pace: dict[str, Any] = dict(_RUN)
        self._past: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        self._latest: dict[str, Any] = {}  # the last message but for its steps
        self._last = 0  # the last step that viewers have got
        self.progress = Progress()  # of the exercises, for all viewers

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    async def follow(self) -> AsyncGenerator[bytes]:
        """The messages for one viewer, JSON: the last steps and the pool first, then what is new."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(_MOST_QUEUED)
        self._viewers.append(queue)
        if self._task is None:
            self._task = begin(self._look_on, "learn-watch")
        elif self._latest:
            queue.put_nowait(msgspec.json.encode({**self._latest, "steps": list(self._past), "is_past": True}))
        try:
            while True:
                yield await queue.get()
        finally:
            self._viewers.remove(queue)
            if not self._viewers:
                await self._stop()

    async def order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Change the pace; returns what holds. It ends by itself some seconds after the last viewer has gone.

        Raises Unanswerable, with the engine's words; another QuireError if no engine answers.
        """
        answer: dict[str, Any] = msgspec.json.decode(
            await self._asked.control(PACE, msgspec.json.encode(order).decode())
        )
        self._pace = answer
        self.look()
        return answer

    def look(self) -> None:
        """Tell the viewers at once what has changed here."""
        self._wake.set()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._viewers:  # one has come meanwhile
            return
        self._past.clear()
        self._latest, self._last = {}, 0
        if self._pace["mode"] != "run":
            self._pace = dict(_RUN)
            with suppress(QuireError):  # then its time is over in a moment
                await self._asked.control(PACE, msgspec.json.encode({"mode": "run"}).decode())

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        told = repeated = -TELL_SECONDS
        shown: object = None
        while True:
            self._wake.clear()
            now = loop.time()
            try:
                if self._pace["mode"] != "run" and now - repeated >= TELL_SECONDS:
                    repeated = now
                    self._pace = msgspec.json.decode(await self._asked.control(PACE, "{}"))
                message = self._read(await self._ask())
            except QuireError as error:
                message = {**self._latest, "steps": [], "trouble": str(error)}
            state = (
                message["steps"],
                message.get("pool"),
                message.get("trouble"),
                dict(self._pace),
                message.get("exercises"),
            )
            if state != shown or now - told >= TELL_SECONDS:
                shown, told = state, now
                self._tell({**message, "pace": self._pace})
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()

    async def _ask(self) -> dict[str, Any]:
        asked = {"after": self._last, "limit": MOST_STEPS}
        answer: dict[str, Any] = msgspec.json.decode(
            await self._asked.inspect("view", msgspec.json.encode(asked).decode())
        )
        if answer["last"] < self._last:  # another engine process
            self._last = 0
            self._past.clear()
            self.progress.begin_anew()
            return await self._ask()
        return answer

    def _read(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The message of an answer: the steps whose results are known, and the pool."""
        steps: list[dict[str, Any]] = []
        for step in answer["steps"]:
            if step["slices"] and step["applied_at"] is None:
                break  # it is being computed
            steps.append(step)
        missed = steps[0]["step_id"] - self._last - 1 if steps and self._last else 0
        self._last = steps[-1]["step_id"] if steps else self._last
        self._past.extend(steps)
        self.progress.take(answer, steps)
        pool = answer["pool"]
        named = {each["request_id"] for each in (*pool["tables"], *pool["waiting"])}
        named |= {piece[0] for step in steps for piece in step["slices"]}
        names = {each: name for each in named if (name := self._names.name(each))}
        self._latest = {"pool": pool, "names": names, "last": answer["last"], "pace": self._pace}
        self._latest["exercises"] = self.progress.states()
        return {**self._latest, "steps": steps, "missed": missed}

    def _tell(self, message: dict[str, Any]) -> None:
        encoded = msgspec.json.encode(message)
        for queue in self._viewers:
            if queue.full():  # it does not read: the oldest is of least use
                queue.get_nowait()
            queue.put_nowait(encoded)
