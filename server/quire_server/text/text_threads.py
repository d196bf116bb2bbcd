"""Runs tokenization, detokenization of whole texts and chat templates off the event loop."""

from __future__ import annotations

import asyncio
import heapq
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

from quire_server.errors import NotReady
from quire_server.text.infilling import Infilling, Parts
from quire_server.text.prompt import ChatTemplate
from quire_server.text.tokenizer import TextTokenizer
from quire_server.text.tokenizer_process import TokenizerGone, TokenizerProcess

INLINE_CHARS = 4096  # a shorter text is encoded in less time than a thread needs to start
_TOGETHER_CHARS = 1 << 15
# A thread cannot be stopped after its client has disconnected, and the server keeps its memory: for a text of this size
# that is a tenth of a second and a few megabytes. The library holds the GIL for some milliseconds to build these ids.
LARGE_CHARS = 1 << 18
LARGE_IDS = 1 << 17
HUGE = 1 << 21  # characters or ids: seconds of work, in a process of its own, so that large texts do not wait
MAX_TEXT_BYTES = 64 << 20
_TOKENIZER_THREADS = 2  # encoding uses a core
_TEMPLATE_THREADS = 8  # rendering mostly waits for another process
# A slot is released by the event loop, whose turns take a tenth of a second at a thousand refusals per second. So short
# conversations, which take less than a millisecond each, get many slots and queue in the thread pool.
_SHORT_PLACES = 64
_BYTES_PER_ID = 8  # a list's entry, without the int objects, which are shared or the caller's

Result = TypeVar("Result")

log = logging.getLogger("quire.text")


class TextThreads:
    """Awaitable tokenizer and chat template: short texts run inline, longer ones in threads, large ones in processes.

    Texts of any length do not block the event loop. Waiting texts are bounded in bytes, and dropped when their caller
    is cancelled. For one event loop. Except `render`, a method keeps its arguments alive only while its caller waits.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompts: ChatTemplate | None, budget: TextBudget | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._budget = budget or TextBudget(MAX_TEXT_BYTES)
        self._tokenizing = SlotQueue(_TOKENIZER_THREADS)
        self._rendering = SlotQueue(_TEMPLATE_THREADS)
        self._rendering_short = SlotQueue(_SHORT_PLACES)
        self._large, self._huge = SlotQueue(1), SlotQueue(1)
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS + _TEMPLATE_THREADS, thread_name_prefix="text")
        self._processes = None
        if tokenizer.file is not None:  # one for large and one for huge texts
            self._processes = TokenizerProcess(tokenizer.file), TokenizerProcess(tokenizer.file)

    async def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Encode like `TextTokenizer.encode`. Raises NotReady if too much text waits."""
        if len(text) <= INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        with self._budget.hold(sys.getsizeof(text)):
            if len(text) > LARGE_CHARS:
                try:
                    async with self._process_for(len(text)) as process:
                        return await process.encode(text, add_special_tokens=add_special_tokens)
                except TokenizerGone as gone:
                    log.warning("a long text is tokenized in the server's own process: %s", gone)
            return await self._in_thread(
                self._tokenizing,
                len(text),
                lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens),
            )

    async def encode_pair(self, one: str, other: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Encode like `TextTokenizer.encode_pair`. Raises NotReady if too much text waits."""
        size = len(one) + len(other)
        work = partial(self._tokenizer.encode_pair, one, other, add_special_tokens=add_special_tokens)
        if size <= INLINE_CHARS:
            return work()
        with self._budget.hold(size):
            return await self._in_thread(self._tokenizing, size, work)

    async def encode_each(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Sequence[int]]:
        """`encode` of each of a request's texts. Many short ones are as much work as a long one, which has a thread.

        Raises NotReady if too much text waits.
        """
        found: list[Sequence[int]] = []
        for some in _together(texts):
            size = sum(map(len, some))
            if len(some) == 1 or size <= INLINE_CHARS:
                found += [await self.encode(text, add_special_tokens=add_special_tokens) for text in some]
                continue
            with self._budget.hold(size):
                work = partial(self._encode_short, some, add_special_tokens)
                found += await self._in_thread(self._tokenizing, size, work)
        return found

    def _encode_short(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    async def infill(self, infilling: Infilling, parts: Parts) -> list[int]:
        """Return the prompt's ids like `Infilling.prompt`. Raises NotReady if too much text waits."""
        if parts.size <= INLINE_CHARS:
            return infilling.prompt(self._tokenizer, parts)
        with self._budget.hold(parts.size):
            return await self._in_thread(self._tokenizing, parts.size, lambda: infilling.prompt(self._tokenizer, parts))

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of valid `ids`, special tokens included."""
        if len(ids) <= INLINE_CHARS:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        with self._budget.hold(_BYTES_PER_ID * len(ids)):
            if len(ids) > LARGE_IDS:
                try:
                    async with self._process_for(len(ids)) as process:
                        return await process.decode(ids)
                except TokenizerGone as gone:
                    log.warning("many tokens are made text in the server's own process: %s", gone)
            return await self._in_thread(
                self._tokenizing, len(ids), lambda: self._tokenizer.decode(ids, skip_special_tokens=False)
            )

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] = (),
        template: str | None = None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Render like `ChatTemplate.render`, with the template that `chosen` gives; None if the model has none.

        `on_turn` is called before the work begins; an exception that it raises ends the call.
        """
        if self._prompts is None:
            return None
        prompts = self._prompts.chosen(has_tools=bool(tools), name=template)
        size = chars_of(messages)
        is_short = size <= INLINE_CHARS
        held: AbstractContextManager[None] = nullcontext() if is_short else self._budget.hold(size)
        with held:
            return await self._in_thread(
                self._rendering_short if is_short else self._rendering,
                size,
                lambda: prompts.render(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    kwargs=kwargs,
                    tools=tools,
                ),
                on_turn,
            )

    def close(self) -> None:
        """End the tokenizer's processes; threads end after their current work."""
        for process in self._processes or ():
            process.stop()
        self._pool.shutdown(wait=False)

    @asynccontextmanager
    async def _process_for(self, size: int) -> AsyncIterator[TokenizerProcess]:
        """The process for a text of so many characters or ids, after a wait for its turn. Raises TokenizerGone."""
        if self._processes is None:
            raise TokenizerGone("the tokenizer was not read from a file")
        slots, process = (self._huge, self._processes[1]) if size > HUGE else (self._large, self._processes[0])
        await slots.take(size)
        try:
            yield process
        finally:
            slots.release()

    async def _in_thread(
        self, slots: SlotQueue, size: int, work: Callable[[], Result], on_turn: Callable[[], None] = lambda: None
    ) -> Result:
        """Run `work` in a thread. A thread cannot be stopped: after a cancellation its slot is in use until it ends."""
        await slots.take(size)
        try:
            on_turn()
            working = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except BaseException:
            slots.release()
            raise

        def ended(done: asyncio.Future[Result]) -> None:
            slots.release()
            if not done.cancelled():
                done.exception()  # mark the exception as retrieved

        working.add_done_callback(ended)
        return await asyncio.shield(working)


def _together(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in their order, short ones in groups that take a thread some milliseconds each."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _TOGETHER_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def chars_of(messages: Sequence[Mapping[str, object]]) -> int:
    """The number of characters in the messages' contents."""
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            for part in content:
                text = part.get("text") if isinstance(part, Mapping) else None
                total += len(text) if isinstance(text, str) else 1
    return total


PATIENCE = 2.0  # seconds of waiting after which a text is served in turn with smaller ones
_BYTES_A_SECOND = 2 << 20  # approximate rate of one core, for Retry-After
_STALE = 64  # entries of cancelled texts before the heap is cleaned up


class TextBudget:
    """The bytes of all texts that wait or are processed. Texts above the budget are refused before any work."""

    def __init__(
        self,
        max_bytes: int,
        *,
        on_change: Callable[[int, int], None] = lambda _bytes, _texts: None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called with the bytes and the number of texts whenever they change."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_texts = 0
        self._on_change = on_change
        self._on_refused = on_refused

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Counts a text of `size` bytes while the block runs. Raises NotReady.

        A text is always accepted if there is no other: its own size is limited elsewhere.
        """
        if self.num_texts and self.num_bytes + size > self.max_bytes:
            self._on_refused()
            raise NotReady(
                "The queue of the tokenizer and the templates is full; retry later.",
                retry_after_seconds=self.num_bytes / _BYTES_A_SECOND,
                code="text_queue_full",
            )
        self._add(size, 1)
        try:
            yield
        finally:
            self._add(-size, -1)

    def _add(self, size: int, texts: int) -> None:
        self.num_bytes += size
        self.num_texts += texts
        self._on_change(self.num_bytes, self.num_texts)


@dataclass(slots=True, kw_only=True)
class _Waiter:
    since: float
    turn: asyncio.Future[None]


class SlotQueue:
    """A queue for a number of slots. The smallest text is next; every other time the oldest, if it has waited long.

    A cancelled caller leaves the queue at once. For one event loop.
    """

    def __init__(self, num_places: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free = num_places
        self._clock = clock
        self._numbers = count()
        self._waiting: dict[int, _Waiter] = {}  # by number, in order of arrival
        self._by_size: list[tuple[int, int]] = []  # a heap of (size, number); some may be cancelled
        self._was_oldest = False

    async def take(self, size: int) -> None:
        """Wait for a slot; `release` must follow."""
        if self._num_free:
            self._num_free -= 1
            return
        number = next(self._numbers)
        waiter = _Waiter(since=self._clock(), turn=asyncio.get_running_loop().create_future())
        self._waiting[number] = waiter
        heapq.heappush(self._by_size, (size, number))
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is None:
                self.release()  # it had just got a slot
            elif len(self._by_size) > 2 * len(self._waiting) + _STALE:
                self._by_size = [entry for entry in self._by_size if entry[1] in self._waiting]
                heapq.heapify(self._by_size)
            raise

    def release(self) -> None:
        """Pass the slot to the next waiting text, or free it."""
        if not self._waiting:
            self._num_free += 1
            self._by_size.clear()
            return
        self._waiting.pop(self._next()).turn.set_result(None)

    def _next(self) -> int:
        oldest, waiter = next(iter(self._waiting.items()))
        self._was_oldest = not self._was_oldest and self._clock() - waiter.since > PATIENCE
        if self._was_oldest:
            return oldest
        while True:
            _, number = heapq.heappop(self._by_size)
            if number in self._waiting:
                return number
