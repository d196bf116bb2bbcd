"""The tokenizer in a process of its own, for texts whose lists of ids would hold the GIL for long.

Owns the process. Promises: the same ids and texts as `TextTokenizer`; a cancelled question ends the process and frees
its memory; an idle process ends.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from quire_engine.gguf import typed_name
from quire_engine.machine import is_stopped
from quire_server.errors import BadRequest
from quire_server.text.tokenizer_worker import (
    DECODE,
    ENCODE,
    ENCODE_WITH_SPECIAL,
    ID_TYPE,
    OK,
    PIECE_BYTES,
)
from quire_server.text.worker_process import FROM_OUTSIDE

T = TypeVar("T")
log = logging.getLogger("quire.text")

_SCRIPT = Path(__file__).with_name("tokenizer_worker.py")
_SECONDS = 120.0  # CPU seconds for one text
_MEMORY_BYTES = 3 << 30  # tokenization needs about 150 bytes per token
_IDLE_SECONDS = 60.0
_LOOK_SECONDS = 0.25  # between two looks whether the process is stopped
_EXIT_SECONDS = 1.0  # between the end of its socket and its exit code
# One text needs one thread; the heaps of a thread for each of many cores would use up the address space.
_FEW_THREADS = ("/usr/bin/env", "TOKENIZERS_PARALLELISM=false", "RAYON_NUM_THREADS=1", "MALLOC_ARENA_MAX=2")
_PIECE_CHARS = PIECE_BYTES // 4  # at most one piece in UTF-8
_PIECE_IDS = PIECE_BYTES // 4


class TokenizerGone(Exception):
    """The process cannot be started: its tokenizer.json is missing or has changed."""


class _Lost(Exception):
    """The process was stopped, or killed from outside, through no fault of the text."""


class TokenizerProcess:
    """Started by the first question, and again after its end. For one event loop, and one question at a time."""

    def __init__(
        self,
        file: Path,
        *,
        seconds: float = _SECONDS,
        memory_bytes: int = _MEMORY_BYTES,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        """`file`: the tokenizer.json; `seconds`: CPU time per text; `memory_bytes`: of the process."""
        self._file = file
        self._version = _version(file)
        self._limits = [str(seconds), str(memory_bytes)]
        self._idle_seconds = idle_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._idle: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process, if any."""
        return None if self._process is None else self._process.pid

    async def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Encode like `TextTokenizer.encode`, with 4 bytes per id. Raises BadRequest, TokenizerGone."""
        question = ENCODE_WITH_SPECIAL if add_special_tokens else ENCODE

        async def encode() -> array[int]:
            ids = array(ID_TYPE)
            parts = (text[at : at + _PIECE_CHARS].encode() for at in range(0, len(text), _PIECE_CHARS))
            await self._ask(question, parts, ids.frombytes)
            return ids

        try:
            return await _with_another_try(encode)
        except UnicodeEncodeError as exc:
            raise BadRequest("The text is not valid Unicode: it has a lone surrogate.") from exc

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of valid `ids`, special tokens included. Raises BadRequest, TokenizerGone."""

        async def decode() -> str:
            decoder = codecs.getincrementaldecoder("utf-8")()
            texts: list[str] = []
            parts = (array(ID_TYPE, ids[at : at + _PIECE_IDS]).tobytes() for at in range(0, len(ids), _PIECE_IDS))
            await self._ask(DECODE, parts, lambda piece: texts.append(decoder.decode(piece)))
            return "".join(texts)

        return await _with_another_try(decode)

    def stop(self) -> None:
        """Kill the process, if it runs. A thread waits for its end, since freeing its memory takes a while."""
        self._cancel_idle_timer()
        process, self._process = self._process, None
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.transport.abort()
        if process is not None:
            process.kill()
            threading.Thread(target=process.wait, name="tokenizer-reaper", daemon=True).start()

    async def _ask(self, question: bytes, content: Iterable[bytes], take: Callable[[bytes], None]) -> None:
        """One exchange; after an error the process is stopped, since it would continue with the question.

        Raises _Lost where the process was stopped by a signal, whose own limits then do not run, or killed from
        outside; BadRequest where it has exceeded its limits.
        """
        self._cancel_idle_timer()
        exchange = asyncio.ensure_future(self._exchange(question, content, take))
        try:
            while not exchange.done():
                await asyncio.wait({exchange}, timeout=_LOOK_SECONDS)
                if not exchange.done() and self.pid is not None and is_stopped(self.pid):
                    raise _Lost
            outcome = await exchange
        except (ConnectionError, asyncio.IncompleteReadError):
            signal = await self._ended_by()
            self.stop()
            raise (_Lost() if signal in FROM_OUTSIDE else _beyond_limits()) from None
        except BaseException:
            exchange.cancel()
            self.stop()
            raise
        self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self.stop)
        if outcome != OK:
            raise _beyond_limits()

    async def _exchange(self, question: bytes, content: Iterable[bytes], take: Callable[[bytes], None]) -> bytes:
        reader, writer = await self._connection()
        for chunk in _framed(chain((question,), content)):
            writer.write(chunk)
            await writer.drain()
        outcome = await _piece(reader)
        while piece := await _piece(reader):
            take(piece)
        return outcome

    async def _ended_by(self) -> int | None:
        """The signal that has ended the process, which has closed its socket already; None: it exited by itself."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._process is not None and time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                return -code if code < 0 else None
            await asyncio.sleep(0.005)
        return None

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._reader is None or self._writer is None:
            if _version(self._file) != self._version:
                raise TokenizerGone(f"{typed_name(self._file)} is not the file that it was at the start")
            ours = self._launch()
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            try:
                while await _piece(self._reader):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError):
                if await self._ended_by() in FROM_OUTSIDE:
                    raise _Lost from None
                raise TokenizerGone("the tokenizer's process could not be started") from None
        return self._reader, self._writer

    def _launch(self) -> socket.socket:
        """Start the process; returns the parent's end of its socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -P: the script's folder must not shadow top-level modules of the process
                    [*_FEW_THREADS, sys.executable, "-P", str(_SCRIPT), str(self._file), *self._limits],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,  # a traceback could show a client's text
                    start_new_session=True,  # a Ctrl-C is for the server, which still answers while it drains
                )
            except OSError as exc:
                ours.close()
                raise TokenizerGone(f"the tokenizer's process could not be started: {exc}") from exc
        ours.setblocking(False)
        return ours

    def _cancel_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


async def _with_another_try(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again, of a new process, where the first one was lost. Raises BadRequest where the second one is, too."""
    try:
        return await ask()
    except _Lost:
        pass
    try:
        return await ask()
    except _Lost:
        raise _beyond_limits() from None


def _framed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield len(piece).to_bytes(4, "little") + piece
    yield bytes(4)


async def _piece(reader: asyncio.StreamReader) -> bytes:
    """The next piece of a message; empty at its end."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    return await reader.readexactly(size) if size else b""


def _version(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _beyond_limits() -> BadRequest:
    return BadRequest("The text is too long for this server's limits.", code="text_too_long")
