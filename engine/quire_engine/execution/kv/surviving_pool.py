"""A KV pool on a CPU in a file of memory that outlives the engine process, with the record of what its blocks hold.

Promises: what the record says of a block is true whenever the process is killed; a pool of another model, layout or
size, or of a process that was not trusted, counts as empty. Only the server's own processes have the file, and it is
gone with them. Must not know: requests.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import accumulate

import torch
from torch import Tensor

from quire_engine.contract.block_record import HeldBlock
from quire_engine.execution.packed.image import HUGE_PAGE, MappedFile, commit_huge

_log = logging.getLogger(__name__)
_MAGIC = b"quire kv pool 001"
_DIGEST_BYTES = sha256().digest_size
_MOST_SCOPES, _SCOPE_BYTES = 1024, 256  # a scope's number is its place; its first two bytes are its length
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # no process can cut it off under another one
_START_SECONDS = 0.25  # of a start in which pages are committed; an idle engine goes on with them


def held_bytes(fd: int | None) -> int:
    """The memory that the file takes already; 0 where there is none."""
    return 0 if fd is None else os.fstat(fd).st_blocks * 512


class SurvivingPool:
    """A mapped pool and its record, `block_record.BlockRecord`.

    The file: a digest of all that the bytes depend on; the scopes; for each block its count of tokens, its group, its
    scope, its content and, where it is not full, its tokens; the pool. A count is 0 while the rest is written.
    """

    def __init__(self, fd: int, key: bytes, *, num_blocks: int, block_bytes: int, block_size: int) -> None:
        """`key`: all that the pool's bytes depend on beside tokens; `block_size`: tokens of a block.

        Raises OSError where the file is of another size, or cannot be mapped.
        """
        sizes = num_blocks, block_bytes, block_size
        parts = [
            64,
            _MOST_SCOPES * _SCOPE_BYTES,
            num_blocks * 2,
            num_blocks,
            num_blocks * 2,
            num_blocks * _DIGEST_BYTES,
            num_blocks * block_size * 4,
        ]
        places = [0, *accumulate(-(-size // 64) * 64 for size in parts)]
        self._pool_at = -(-places[-1] // HUGE_PAGE) * HUGE_PAGE
        num_bytes = self._pool_at + -(-num_blocks * block_bytes // HUGE_PAGE) * HUGE_PAGE
        _make(fd, num_bytes)
        self._mapped = MappedFile(fd, num_bytes, writable=True)
        self.memory: Tensor = self._mapped.bytes[self._pool_at : self._pool_at + num_blocks * block_bytes]
        cut = [self._mapped.bytes[at : at + size] for at, size in zip(places, parts, strict=False)]
        self._all_counts, self._block_size = cut[2].view(torch.int16), block_size
        head, self._scopes, counts, self._groups, numbers, self._contents, tokens = [part.numpy().data for part in cut]
        self._counts, self._numbers, self._tokens = counts.cast("h"), numbers.cast("H"), tokens.cast("i")
        name = _MAGIC + sha256(repr((key, sizes)).encode()).digest()
        if bytes(head[: len(name)]) != name:  # a new file, or another's, or one that is not to be believed
            cut[0].zero_()
            cut[1].zero_()
            self.clear()
            head[: len(name)] = name
        self._number_of = {text: number for number, text in enumerate(self._known_scopes())}
        self._committed_to = self._pool_at

    def found(self) -> Iterator[HeldBlock]:
        """See `BlockRecord`, in the order of the blocks."""
        scopes, size = list(self._known_scopes()), self._block_size
        for block in self._all_counts.nonzero().flatten().tolist():
            count, number = self._counts[block], self._numbers[block]
            yield HeldBlock(
                block=block,
                content=bytes(self._contents[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES]),
                scope=scopes[number],
                group=self._groups[block],
                tokens=() if count == size else tuple(self._tokens[block * size : block * size + count]),
            )

    def fill(self, block: int, content: bytes, group: int, scope: str) -> None:
        self._write(block, content, group, scope, self._block_size)

    def begin(self, block: int, parent: bytes, tokens: Sequence[int], scope: str) -> None:
        size = self._block_size
        if not 0 < len(tokens) < size:
            raise ValueError(f"{len(tokens)} tokens do not begin a block of {size}")
        self._counts[block] = 0
        self._tokens[block * size : block * size + len(tokens)] = array("i", tokens)
        self._write(block, parent, 0, scope, len(tokens))

    def lose(self, block: int) -> None:
        self._counts[block] = 0

    def clear(self) -> None:
        """Believe nothing that the process before has left."""
        self._all_counts.zero_()

    def commit_next(self) -> int:
        """Commit one more huge page of the pool, in the order in which blocks are taken; how many are left.

        The page keeps its contents. 0 also where the system has no huge page for it: the pages that are left are then
        committed by the first writes to them, in small ones.
        """
        end = self._mapped.bytes.numel()
        if self._committed_to < end:
            done = commit_huge(self._mapped.bytes.data_ptr() + self._committed_to)
            self._committed_to = self._committed_to + HUGE_PAGE if done else end
        return (end - self._committed_to) // HUGE_PAGE

    def commit_for(self, seconds: float) -> None:
        """Commit huge pages until none is left or the time is up."""
        until = time.monotonic() + seconds
        while self.commit_next() and time.monotonic() < until:
            pass

    def _write(self, block: int, content: bytes, group: int, scope: str, count: int) -> None:
        number = self._number(scope)
        self._counts[block] = 0
        if number is None:
            return
        self._contents[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES] = content
        self._groups[block], self._numbers[block] = group, number
        self._counts[block] = count

    def _number(self, scope: str) -> int | None:
        """The scope's place in the file; None where it has no room: its blocks are computed again."""
        number = self._number_of.get(scope)
        if number is None:
            text, number = scope.encode("utf-8", "surrogatepass"), len(self._number_of)
            if number >= _MOST_SCOPES or len(text) > _SCOPE_BYTES - 2:
                return None
            at = number * _SCOPE_BYTES
            self._scopes[at + 2 : at + 2 + len(text)] = text
            self._scopes[at : at + 2] = (len(text) + 1).to_bytes(2, "little")
            self._number_of[scope] = number
        return number

    def _known_scopes(self) -> Iterator[str]:
        for at in range(0, _MOST_SCOPES * _SCOPE_BYTES, _SCOPE_BYTES):
            size = int.from_bytes(self._scopes[at : at + 2], "little")
            if size == 0:
                return
            yield bytes(self._scopes[at + 2 : at + 1 + size]).decode("utf-8", "surrogatepass")


def open_surviving(
    fd: int | None, key: bytes, *, is_wanted: bool, num_blocks: int, block_bytes: int, block_size: int
) -> SurvivingPool | None:
    """The pool in the file, which is closed here; None where there is no file that can be used, or none is wanted."""
    if fd is None:
        return None
    try:
        if not is_wanted:
            return None
        pool = SurvivingPool(fd, key, num_blocks=num_blocks, block_bytes=block_bytes, block_size=block_size)
    except (OSError, ValueError) as error:
        _log.warning("the KV pool is memory of the engine process alone: %s", error)
        return None
    finally:
        os.close(fd)
    pool.commit_for(_START_SECONDS)
    return pool


def _make(fd: int, num_bytes: int) -> None:
    """Give an empty file its size for good. Raises OSError where it has another one."""
    size = os.fstat(fd).st_size
    if size == 0:
        os.ftruncate(fd, num_bytes)  # takes nothing until it is written to
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    elif size != num_bytes:
        raise OSError(f"its file has {size} bytes, and the pool needs {num_bytes}")
