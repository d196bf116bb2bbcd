"""The tokenizer in a process of its own: the same ids and texts, and an end whenever nobody needs it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from quire_server.errors import BadRequest
from quire_server.text.text_threads import HUGE, LARGE_CHARS, LARGE_IDS, TextBudget, TextThreads
from quire_server.text.tokenizer import TextTokenizer
from quire_server.text.tokenizer_process import TokenizerGone, TokenizerProcess
from support.covering import few
from support.fake_tokenizer import write_tokenizer
from support.processes import lives
from support.sample_tokenizers import TEXT, byte_level, sentencepiece

pytestmark = pytest.mark.anyio


def long_text(size: int) -> str:
    draw = random.Random(1)
    return "".join(draw.choice([*TEXT, "<s>", "two words", "\n\n", "😀", "e\u0301"]) for _ in range(size // 20))[:size]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


async def gone(pid: int | None) -> bool:
    async with asyncio.timeout(300):
        while pid is not None and lives(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return True


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
async def test_ids_and_texts_are_those_of_the_tokenizer(make: object, tmp_path: Path) -> None:
    make().save(str(tmp_path / "tokenizer.json"))  # type: ignore[operator]
    tokenizer = TextTokenizer.load(tmp_path)
    process = TokenizerProcess(tmp_path / "tokenizer.json")
    try:
        for text in ("", long_text(300_000)):
            for special in (False, True):
                ids = await process.encode(text, add_special_tokens=special)
                assert list(ids) == tokenizer.encode(text, add_special_tokens=special)
            assert await process.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
        assert psutil.Process(process.pid).num_threads() <= 2, "also where there are many cores"
    finally:
        process.stop()


async def test_what_is_given_up_ends_and_the_next_is_answered(folder: Path) -> None:
    process = TokenizerProcess(folder / "tokenizer.json")
    try:
        working = asyncio.create_task(process.encode(long_text(3_000_000), add_special_tokens=False))
        await asyncio.sleep(0.3)
        pid = process.pid
        assert pid is not None
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert process.pid is None
        assert await gone(pid)
        assert list(await process.encode("abc", add_special_tokens=False)) == [97, 98, 99]
    finally:
        process.stop()


@pytest.mark.parametrize("number", few([signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM], signal.SIGSTOP))
async def test_a_process_that_is_stopped_or_killed_at_work_is_replaced_once(folder: Path, number: int) -> None:
    process, text = TokenizerProcess(folder / "tokenizer.json"), long_text(2_000_000)
    try:
        hit: set[int] = set()

        async def strike(most: int) -> None:
            while len(hit) < most:
                await asyncio.sleep(0.1)
                if process.pid is not None and process.pid not in hit:
                    hit.add(process.pid)
                    os.kill(process.pid, number)

        async with asyncio.timeout(300):
            ids, _ = await asyncio.gather(process.encode(text, add_special_tokens=False), strike(1))
            assert await process.decode(ids) == text
            with pytest.raises(BadRequest, match="limits"):
                await asyncio.gather(process.encode(text, add_special_tokens=False), strike(3))
            assert list(await process.encode("a", add_special_tokens=False)) == [97]
        assert all([await gone(pid) for pid in hit])
    finally:
        process.stop()


async def test_a_text_beyond_the_limits_is_refused(folder: Path) -> None:
    process = TokenizerProcess(folder / "tokenizer.json", memory_bytes=500 << 20)
    try:
        with pytest.raises(BadRequest, match="limits"):
            await process.encode("a" * (4 << 20), add_special_tokens=False)
        assert list(await process.encode("a", add_special_tokens=False)) == [97]
    finally:
        process.stop()


async def test_a_lone_surrogate_is_refused(folder: Path) -> None:
    process = TokenizerProcess(folder / "tokenizer.json")
    try:
        with pytest.raises(BadRequest, match="surrogate"):
            await process.encode("a" * 100_000 + "\ud800", add_special_tokens=False)
        assert list(await process.encode("a", add_special_tokens=False)) == [97]
    finally:
        process.stop()


async def test_an_idle_process_ends(folder: Path) -> None:
    process = TokenizerProcess(folder / "tokenizer.json", idle_seconds=0.05)
    await process.encode("a", add_special_tokens=False)
    pid = process.pid
    await asyncio.sleep(0.1)
    assert process.pid is None
    assert await gone(pid)


async def test_another_file_is_not_used(folder: Path) -> None:
    process = TokenizerProcess(folder / "tokenizer.json")
    os.utime(folder / "tokenizer.json", (1, 1))
    with pytest.raises(TokenizerGone):
        await process.encode("a", add_special_tokens=False)


@pytest.fixture
async def threads(folder: Path) -> AsyncIterator[TextThreads]:
    threads = TextThreads(TextTokenizer.load(folder), None, TextBudget(1 << 30))
    yield threads
    threads.close()


async def test_all_sizes_give_the_same(threads: TextThreads, folder: Path) -> None:
    tokenizer = TextTokenizer.load(folder)
    for size in (10, 5000, LARGE_CHARS + 1):
        text = long_text(size)
        ids = await threads.encode(text, add_special_tokens=False)
        assert list(ids) == tokenizer.encode(text, add_special_tokens=False)
        assert await threads.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert len(ids) > LARGE_IDS


async def test_where_the_file_is_gone_it_is_done_here(threads: TextThreads, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    text = "a" * (LARGE_CHARS + 1)
    assert list(await threads.encode(text, add_special_tokens=False)) == [97] * len(text)


async def test_a_large_text_does_not_wait_for_a_huge_one(threads: TextThreads) -> None:
    huge = asyncio.create_task(threads.encode("ab" * (2 * HUGE), add_special_tokens=False))
    await asyncio.sleep(0.1)
    assert len(await threads.encode("a" * (LARGE_CHARS + 1), add_special_tokens=False)) == LARGE_CHARS + 1
    assert not huge.done()
    huge.cancel()
    await asyncio.gather(huge, return_exceptions=True)


async def test_a_short_text_passes_long_ones_whose_callers_have_left(threads: TextThreads) -> None:
    long = [asyncio.create_task(threads.encode("ab" * LARGE_CHARS, add_special_tokens=False)) for _ in range(12)]
    await asyncio.sleep(0.2)
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    assert threads._budget.num_texts == 0
    async with asyncio.timeout(300):
        assert len(await threads.encode("a" * 5000, add_special_tokens=False)) == 5000
