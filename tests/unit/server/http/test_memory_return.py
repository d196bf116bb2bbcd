"""Memory is given back when the process has grown and rests."""

from __future__ import annotations

import pytest

from quire_server.http.memory import GROWTH_BYTES, MemoryReturn, resident_bytes

pytestmark = pytest.mark.anyio


class Process:
    def __init__(self) -> None:
        self.size = 100 << 20
        self.freed = 0
        self.trims = 0

    def trim(self) -> None:
        self.trims += 1
        self.size -= self.freed
        self.freed = 0


async def test_it_is_given_back_once_the_process_rests() -> None:
    process, given = Process(), []
    memory = MemoryReturn(given.append, resident=lambda: process.size, trim=process.trim)
    await memory.look()
    assert process.trims == 0
    process.size += 2 * GROWTH_BYTES
    process.freed = 2 * GROWTH_BYTES
    await memory.look()
    assert process.trims == 0, "it still grows"
    await memory.look()
    assert (process.trims, given, process.size) == (1, [2 * GROWTH_BYTES], 100 << 20)


async def test_what_is_used_is_not_asked_for_again() -> None:
    process, given = Process(), []
    memory = MemoryReturn(given.append, resident=lambda: process.size, trim=process.trim)
    process.size += 2 * GROWTH_BYTES
    for _ in range(5):
        await memory.look()
    assert (process.trims, given) == (1, [])
    process.size += GROWTH_BYTES
    for _ in range(5):
        await memory.look()
    assert process.trims == 2


async def test_the_system_tells_how_large_the_process_is() -> None:
    assert resident_bytes() > 10 << 20
    MemoryReturn(lambda _: None)._trim()  # type: ignore[misc]  # glibc's
