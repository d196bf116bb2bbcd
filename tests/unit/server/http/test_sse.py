"""The event stream against a bare ASGI server: leaving and stalling clients, errors, writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire_engine.own_pauses import OwnPauses
from quire_server.errors import ApiError, ClientGone, EngineFailed
from quire_server.http.sse import DONE, KEEP_ALIVE, EventStream, WriteClock, WritePace, error_frames
from support.asgi_exchange import Exchange

LAST = b"event: over\ndata: {}\n\n"  # how a dialect without DONE may end its streams
LONG = 3600.0  # seconds, far beyond every wait here


class Frames:
    """A generator of frames that knows whether it was closed."""

    def __init__(self, *items: object) -> None:
        self.items = items
        self.is_closed = False
        self.finished = False

    async def __call__(self) -> AsyncGenerator[bytes]:
        try:
            for item in self.items:
                if isinstance(item, float):
                    await asyncio.sleep(item)
                elif isinstance(item, Exception):
                    raise item
                else:
                    self.finished = item.endswith((DONE, LAST))
                    yield item
        finally:
            self.is_closed = True


def serve(
    frames: Frames,
    server: Exchange,
    *,
    keep_alive: float = 0,
    failure: Callable[[ApiError], bytes] = error_frames,
) -> asyncio.Task[None]:
    reply = EventStream(
        frames(),
        bytes,
        progress=frames,
        failure=failure,
        headers={"x-a": "b"},
        keep_alive_seconds=keep_alive,
    )
    return asyncio.ensure_future(reply({"type": "http"}, server.receive, server.send))


def test_one_write_per_item_and_none_for_the_end() -> None:
    async def run() -> None:
        server = Exchange()
        await serve(Frames(b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n" + DONE), server)
        assert [message["type"] for message in server.sent] == ["http.response.start"] + ["http.response.body"] * 2
        assert [message.get("more_body") for message in server.sent] == [None, True, False]
        headers = dict(server.sent[0]["headers"])
        assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert headers[b"x-a"] == b"b"

    asyncio.run(run())


def test_a_dialect_ends_its_streams_in_its_own_way() -> None:
    async def run() -> None:
        server = Exchange()
        await serve(Frames(b"data: 1\n\n", LAST), server)
        assert server.body == b"data: 1\n\n" + LAST
        assert server.sent[-1] == {"type": "http.response.body", "body": LAST, "more_body": False}
        failed = Exchange()
        await serve(Frames(b"data: 1\n\n", EngineFailed("bad luck")), failed, failure=lambda e: e.message.encode())
        assert failed.body == b"data: 1\n\nbad luck"
        assert failed.sent[-1]["more_body"] is False

    asyncio.run(run())


def test_an_item_without_frames_is_not_written() -> None:
    async def run() -> None:
        server = Exchange()
        await serve(Frames(b"", 0.01, b"data: 1\n\n", b"", DONE), server)
        assert [message["body"] for message in server.sent[1:]] == [b"data: 1\n\n", DONE]

    asyncio.run(run())


def test_a_client_that_leaves_closes_the_frames_at_once() -> None:
    async def run() -> None:
        frames, server = Frames(b"data: 1\n\n", LONG), Exchange()
        task = serve(frames, server)
        await asyncio.sleep(0.01)
        server.leaves.set()
        await asyncio.wait_for(task, 300)
        assert frames.is_closed

    asyncio.run(run())


def test_a_client_that_leaves_before_the_first_frame() -> None:
    async def run() -> None:
        frames, server = Frames(LONG), Exchange()
        task = serve(frames, server)
        await asyncio.sleep(0.01)
        server.leaves.set()
        with pytest.raises(ClientGone):
            await asyncio.wait_for(task, 300)
        assert frames.is_closed
        assert server.sent == []

    asyncio.run(run())


def test_frames_are_not_asked_for_while_the_client_does_not_read() -> None:
    async def run() -> None:
        frames, server = Frames(b"data: 1\n\n", b"data: 2\n\n", DONE), Exchange()
        asked: list[bytes] = []

        async def watched() -> AsyncGenerator[bytes]:
            async for item in frames():
                asked.append(item)
                yield item

        server.takes.clear()
        reply = EventStream(
            watched(), bytes, progress=frames, failure=error_frames, headers={}, keep_alive_seconds=0.01
        )
        task = asyncio.ensure_future(reply({"type": "http"}, server.receive, server.send))
        await asyncio.sleep(0.1)
        assert asked == [b"data: 1\n\n"]
        assert KEEP_ALIVE not in server.body, "who does not read needs no signs of life"
        server.takes.set()
        await asyncio.wait_for(task, 300)
        assert server.body.replace(KEEP_ALIVE, b"") == b"data: 1\n\ndata: 2\n\n" + DONE

    asyncio.run(run())


def test_comments_only_in_silence() -> None:
    async def run() -> None:
        server = Exchange()
        await serve(Frames(b"data: 1\n\n", 0.25, b"data: 2\n\n", DONE), server, keep_alive=0.1)
        assert server.body == b"data: 1\n\n" + KEEP_ALIVE * 2 + b"data: 2\n\n" + DONE
        silent = Exchange()
        await serve(Frames(b"data: 1\n\n", 0.2, DONE), silent, keep_alive=0)
        assert KEEP_ALIVE not in silent.body

    asyncio.run(run())


@pytest.mark.parametrize("error", [EngineFailed("x"), RuntimeError("x")])
def test_an_error_before_the_first_frame_is_raised(error: Exception) -> None:
    async def run() -> None:
        server = Exchange()
        with pytest.raises(type(error)):
            await serve(Frames(error), server)
        assert server.sent == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "text"),
    [(EngineFailed("bad luck"), b"bad luck"), (RuntimeError("a secret"), b"internal error"), (ApiError("y"), b'"y"')],
)
def test_a_later_error_is_sent_and_then_the_end(error: Exception, text: bytes) -> None:
    async def run() -> None:
        server = Exchange()
        await serve(Frames(b"data: 1\n\n", error), server)
        last = server.sent[-1]["body"]
        assert last.startswith(b'data: {"error":{')
        assert last.endswith(DONE)
        assert text in last
        assert b"secret" not in last
        assert server.sent[-1]["more_body"] is False

    asyncio.run(run())


def test_a_cancelled_reply_closes_the_frames() -> None:
    async def run() -> None:
        frames, server = Frames(b"data: 1\n\n", LONG), Exchange()
        task = serve(frames, server)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert frames.is_closed

    asyncio.run(run())


class Clock:
    """A loop whose time passes when it is told, and a transport with so many bytes that wait."""

    def __init__(self, waiting: int) -> None:
        self.waiting, self.aborted, self.due = waiting, False, list[Any]()
        self.now = 100.0
        self.pauses = OwnPauses(0.5, clock=lambda: self.now)

    def call_later(self, seconds: float, callback: Any) -> Any:
        assert seconds == PACE.seconds
        self.due.append(callback)
        return SimpleNamespace(cancel=self.due.clear)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def get_extra_info(self, name: str) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True

    def window(self, read: int, *, paused: bool = False) -> bool:
        """A window in which the client has read so much, or this process was paused; whether another begins."""
        self.waiting -= read
        for _ in range(1 if paused else 4):
            self.pauses.look()
            self.now += PACE.seconds * (10 if paused else 0.25)
        self.due.pop()()
        return bool(self.due)


PACE = WritePace(seconds=2.0, bytes_per_second=500)


def test_a_client_is_cut_when_it_reads_less_than_the_least_rate_in_a_window() -> None:
    clock = Clock(waiting=10_000)
    WriteClock(clock, PACE, clock, clock.pauses).start()  # type: ignore[arg-type]
    assert clock.window(read=1_000)
    assert clock.window(read=4_000)
    assert not clock.aborted
    assert not clock.window(read=999)
    assert clock.aborted


def test_a_client_is_not_cut_for_a_window_in_which_the_server_was_paused() -> None:
    clock = Clock(waiting=10_000)
    WriteClock(clock, PACE, clock, clock.pauses).start()  # type: ignore[arg-type]
    assert clock.window(read=0, paused=True)
    assert not clock.aborted
    assert not clock.window(read=0)
    assert clock.aborted


def test_a_client_that_has_read_all_or_is_gone_is_not_timed() -> None:
    clock = Clock(waiting=100)
    pace = WriteClock(clock, PACE, clock, clock.pauses)  # type: ignore[arg-type]
    pace.start()
    assert not clock.window(read=100)
    pace.start()
    pace.stop()
    assert (clock.due, clock.aborted) == ([], False)
