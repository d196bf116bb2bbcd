"""A pool's memory that outlives its process: what the next one finds there, and when it finds nothing."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from quire_engine.contract.block_record import HeldBlock
from quire_engine.execution.kv import surviving_pool
from quire_engine.execution.kv.surviving_pool import SurvivingPool, held_bytes, open_surviving
from quire_engine.execution.packed.image import HUGE_PAGE, MappedFile, commit_huge
from quire_server.engine.memory_files import PoolMemory
from support.covering import few

KEY = b"a model and its layout"
FULL, OTHER = bytes(range(32)), bytes(range(32, 64))
SIZES = {"num_blocks": 40, "block_bytes": 5000, "block_size": 8}


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    memory = PoolMemory()
    yield memory
    memory.close()


def huge_bytes(address: int) -> int:
    """Bytes of the mapping at an address that are mapped by huge pages."""
    inside, found = False, 0
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
            elif inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
                found += int(line.split()[1]) << 10
    return found


def makes_huge_pages() -> bool:
    fd = os.memfd_create("huge")
    try:
        os.ftruncate(fd, HUGE_PAGE)
        mapped = MappedFile(fd, HUGE_PAGE, writable=True)
        return commit_huge(mapped.bytes.data_ptr())
    finally:
        os.close(fd)


def commit_patiently(address: int) -> bool:
    """`commit_huge`, which waits while the memory that others use is in too small pieces."""
    for _ in range(300):
        if commit_huge(address):
            return True
        time.sleep(0.1)
    pytest.skip("other processes leave no huge page")


def opened(memory: PoolMemory, key: bytes = KEY, **sizes: int) -> SurvivingPool:
    fd = memory.for_next_engine()
    assert fd is not None
    return SurvivingPool(fd, key, **{**SIZES, **sizes})


def test_the_next_one_finds_what_was_written(memory: PoolMemory) -> None:
    first = opened(memory)
    assert list(first.found()) == []
    assert not first.memory.any()
    first.fill(3, FULL, 1, "tenant")
    first.begin(7, OTHER, [5, 6, 2**31 - 1], "")
    first.fill(39, OTHER, 0, "tenant")
    first.fill(4, FULL, 0, "")
    first.lose(4)
    first.memory[15000:20000] = 7
    again = opened(memory)
    assert list(again.found()) == [
        HeldBlock(block=3, content=FULL, group=1, scope="tenant"),
        HeldBlock(block=7, content=OTHER, tokens=(5, 6, 2**31 - 1), scope=""),
        HeldBlock(block=39, content=OTHER, scope="tenant"),
    ]
    assert again.memory.shape == (40 * 5000,)
    assert int(again.memory[15000:20000].sum()) == 7 * 5000
    again.fill(7, FULL, 0, "another")
    assert [each.scope for each in opened(memory).found()] == ["tenant", "another", "tenant"]


def test_a_pool_of_something_else_or_of_who_failed_counts_as_empty(memory: PoolMemory) -> None:
    opened(memory).fill(3, FULL, 0, "")
    assert list(opened(memory, b"another model").found()) == []
    assert list(opened(memory).found()) == []  # overwritten since
    opened(memory).fill(3, FULL, 0, "")
    memory.distrust()
    assert list(opened(memory).found()) == []
    opened(memory).fill(3, FULL, 0, "")
    pool = opened(memory)
    pool.clear()
    assert list(opened(memory).found()) == []


def test_a_file_of_another_size_is_not_used(memory: PoolMemory, caplog: pytest.LogCaptureFixture) -> None:
    opened(memory)
    fd = memory.for_next_engine()
    assert fd is not None
    assert open_surviving(os.dup(fd), KEY, is_wanted=True, **{**SIZES, "num_blocks": 4000}) is None
    assert "the KV pool is memory of the engine process alone" in caplog.text
    assert open_surviving(None, KEY, is_wanted=True, **SIZES) is None
    unwanted = os.dup(fd)
    assert open_surviving(unwanted, KEY, is_wanted=False, **SIZES) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(unwanted)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)


def test_scopes_that_have_no_room_are_computed_again(memory: PoolMemory) -> None:
    pool = opened(memory)
    pool.fill(1, FULL, 0, "x" * 254)
    pool.fill(2, FULL, 0, "x" * 255)
    pool.fill(3, FULL, 0, "\udcff")
    for number in range(2000):
        pool.fill(number % 30 + 4, FULL, 0, f"tenant {number}")
    assert [(each.block, each.scope) for each in opened(memory).found()] == [(1, "x" * 254), (3, "\udcff")]


def test_a_begun_block_has_fewer_tokens_than_it_has_room_for(memory: PoolMemory) -> None:
    pool = opened(memory)
    for tokens in ([], list(range(8))):
        with pytest.raises(ValueError, match=f"{len(tokens)} tokens do not begin a block of 8"):
            pool.begin(1, FULL, tokens, "")
    assert list(pool.found()) == []


def test_nobody_else_may_read_it_and_it_is_gone_with_its_holder(memory: PoolMemory) -> None:
    opened(memory).fill(1, FULL, 0, "")
    fd = memory.for_next_engine()
    assert fd is not None
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    assert not os.get_inheritable(fd)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    assert os.fstat(fd).st_nlink == 0  # it has no name
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


WRITER = """
import os, sys
from quire_engine.execution.kv import surviving_pool
from quire_engine.execution.packed.image import HUGE_PAGE, MappedFile, commit_huge
from quire_engine.execution.kv.surviving_pool import SurvivingPool
pool = SurvivingPool(int(sys.argv[1]), b"key", num_blocks=40, block_bytes=5000, block_size=8)
print("ready", flush=True)
number = 0
while True:
    number += 1
    block, content = number % 40, (number % 251).to_bytes(1, "little") * 32
    pool.lose(block)
    pool.memory[block * 5000 : (block + 1) * 5000] = number % 251
    pool.fill(block, content, 0, "")
"""


@pytest.mark.parametrize("kills", few([1, 3], 1))
def test_a_process_that_is_killed_in_the_middle_leaves_no_lie(memory: PoolMemory, kills: int) -> None:
    fd = memory.for_next_engine()
    assert fd is not None
    seen = done = 0
    while not seen or done < kills:  # a busy machine kills some before they have written
        done += 1
        command = [sys.executable, "-c", WRITER, str(fd)]
        with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
        pool = opened(memory, b"key")
        rows = pool.memory.view(40, 5000)
        for each in pool.found():
            assert bytes(rows[each.block].numpy()) == each.content[:1] * 5000
            seen += 1
    assert seen > 0


def test_committing_changes_nothing(memory: PoolMemory) -> None:
    pool = opened(memory, num_blocks=1000)
    pool.memory[::4096] = 9
    pool.commit_for(60.0)
    assert pool.commit_next() == 0
    assert int(pool.memory.sum(dtype=torch.int64)) == 9 * len(range(0, pool.memory.numel(), 4096))
    assert held_bytes(memory.for_next_engine()) >= pool.memory.numel()
    assert held_bytes(None) == 0


@pytest.mark.skipif(not makes_huge_pages(), reason="this system makes no huge pages of files of memory")
def test_each_piece_is_one_huge_page_of_which_none_was_a_small_one_before(
    memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surviving_pool, "commit_huge", commit_patiently)
    pool = opened(memory, num_blocks=4000)  # 19.1 MiB: ten huge pages
    fd, start = memory.for_next_engine(), pool.memory.data_ptr()
    beside = held_bytes(fd)  # of the record
    assert huge_bytes(start) == 0
    left = [pool.commit_next() for _ in range(4)]
    assert left == [9, 8, 7, 6]
    assert huge_bytes(start) == 4 * HUGE_PAGE
    assert held_bytes(fd) == beside + 4 * HUGE_PAGE  # the rest takes nothing yet
    pool.commit_for(60.0)
    assert huge_bytes(start) == 10 * HUGE_PAGE
    assert not pool.memory.any()
    again = opened(memory, num_blocks=4000)  # which finds them huge
    assert again.commit_next() == 9
    assert held_bytes(fd) == beside + 10 * HUGE_PAGE


def test_a_start_commits_for_a_moment_and_leaves_the_rest_to_idle_engines(
    memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    monkeypatch.setattr(surviving_pool, "commit_huge", lambda address: pieces.append(address) or True)
    monkeypatch.setattr(surviving_pool, "time", SimpleNamespace(monotonic=iter([0.0, 0.1, 0.2, 0.3]).__next__))
    fd = memory.for_next_engine()
    assert fd is not None
    pool = open_surviving(os.dup(fd), KEY, is_wanted=True, **{**SIZES, "num_blocks": 4000})
    assert pool is not None
    start = pool.memory.data_ptr()
    assert pieces == [start + number * HUGE_PAGE for number in range(3)]  # a quarter of a second
    assert [pool.commit_next() for _ in range(8)] == [6, 5, 4, 3, 2, 1, 0, 0]
    assert len(pieces) == 10


def test_a_system_without_huge_pages_is_asked_once(memory: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(surviving_pool, "commit_huge", lambda address: bool(asked.append(address)))
    pool = opened(memory, num_blocks=4000)
    assert [pool.commit_next() for _ in range(3)] == [0, 0, 0]
    assert len(asked) == 1
