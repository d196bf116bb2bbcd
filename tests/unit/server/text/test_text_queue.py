"""Who is next when text waits to be worked on, and how much may wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire_server.errors import NotReady
from quire_server.text.text_threads import INLINE_CHARS, PATIENCE, SlotQueue, TextBudget, TextThreads
from quire_server.text.tokenizer import TextTokenizer
from support.fake_tokenizer import tokenizer_path

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def queue(slots: SlotQueue, *sizes: int) -> tuple[list[int], list[asyncio.Task[None]]]:
    """Behind one that has the only place: who waits, and the list of those whose turn has come."""
    served: list[int] = []

    async def wait(size: int) -> None:
        await slots.take(size)
        served.append(size)

    await slots.take(0)
    waiting = []
    for size in sizes:
        waiting.append(asyncio.create_task(wait(size)))
        await asyncio.sleep(0)
    return served, waiting


async def pass_on(slots: SlotQueue, times: int) -> None:
    for _ in range(times):
        slots.release()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_the_smallest_is_next() -> None:
    slots = SlotQueue(1)
    served, _ = await queue(slots, 900, 5, 70, 5000, 1)
    await pass_on(slots, 5)
    assert served == [1, 5, 70, 900, 5000]


async def test_of_those_that_wait_long_the_oldest_is_every_other() -> None:
    clock = Clock()
    slots = SlotQueue(1, clock=clock)
    served, _ = await queue(slots, 900, 800, 3, 2, 1)
    clock.now = 2 * PATIENCE
    await pass_on(slots, 5)
    assert served == [900, 1, 800, 2, 3]


async def test_who_is_cancelled_leaves_and_its_place_is_not_lost() -> None:
    slots = SlotQueue(1)
    served, waiting = await queue(slots, 1, 2, 3)
    waiting[0].cancel()
    await asyncio.sleep(0)
    slots.release()  # to the second ...
    waiting[1].cancel()  # ... which is cancelled before it knows
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    await asyncio.sleep(0)
    assert served == [3]
    slots.release()
    await asyncio.wait_for(slots.take(1), 300)


async def test_those_that_left_are_forgotten() -> None:
    slots = SlotQueue(1)
    _, waiting = await queue(slots, *range(1000))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(slots._by_size) < 200


async def test_what_waits_is_bounded() -> None:
    told: list[tuple[int, int]] = []
    refused: list[bool] = []
    budget = TextBudget(100, on_change=lambda *counts: told.append(counts), on_refused=lambda: refused.append(True))
    with budget.hold(60):
        with pytest.raises(NotReady) as caught, budget.hold(41):
            pass
        assert caught.value.code == "text_queue_full"
        assert int(caught.value.headers["Retry-After"]) >= 1
        with budget.hold(40):
            assert budget.num_bytes == 100
    assert told[-1] == (0, 0)
    assert refused == [True]


async def test_a_text_that_is_alone_is_taken_whatever_its_size() -> None:
    budget = TextBudget(10)
    with budget.hold(1000), pytest.raises(NotReady), budget.hold(1):
        pass


async def test_texts_of_a_request_are_encoded_as_each_alone_and_many_in_a_thread() -> None:
    used: set[int] = set()

    class Watched(TextTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            used.add(threading.get_ident())
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer = Watched.load(tokenizer_path())
    here = threading.get_ident()
    short, long = ["a tale", "", "of seven"], ["a" * 3000, "b" * INLINE_CHARS, "c" * 40_000, *["d" * 900] * 64]
    for texts, inline in ((short, True), (long, False), ([*short, *long], False)):
        used.clear()
        threads = TextThreads(tokenizer, None)
        found = await threads.encode_each(texts, add_special_tokens=False)
        assert (here in used) is inline
        threads.close()
        assert found == [tokenizer.encode(text, add_special_tokens=False) for text in texts]
