"""Text work off the event loop: tokenizing, detokenizing whole texts, rendering chat templates.

Promises: a text of any length leaves the loop free; only a bounded number of worker threads is taken.
Must not know: what the texts are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio.to_thread
from anyio import CapacityLimiter

from quire_server.text.infilling import Infilling, Parts
from quire_server.text.prompt import ChatTemplate
from quire_server.text.tokenizer import TextTokenizer

INLINE_CHARS = 4096  # a shorter text is encoded in less time than a thread takes to answer
_TOKENIZER_THREADS = 2  # encoding holds a core
_TEMPLATE_THREADS = 8  # rendering waits for another process


class TextThreads:
    """The tokenizer and the chat template, awaitable. Encoding releases the interpreter lock."""

    def __init__(self, tokenizer: TextTokenizer, prompts: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._tokenizing = CapacityLimiter(_TOKENIZER_THREADS)
        self._rendering = CapacityLimiter(_TEMPLATE_THREADS)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As `TextTokenizer.encode`."""
        if len(text) <= INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await anyio.to_thread.run_sync(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens), limiter=self._tokenizing
        )

    async def infill(self, infilling: Infilling, parts: Parts) -> list[int]:
        """As `Infilling.prompt`."""
        if parts.size <= INLINE_CHARS:
            return infilling.prompt(self._tokenizer, parts)
        return await anyio.to_thread.run_sync(
            lambda: infilling.prompt(self._tokenizer, parts), limiter=self._tokenizing
        )

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        if len(ids) <= INLINE_CHARS:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        return await anyio.to_thread.run_sync(
            lambda: self._tokenizer.decode(ids, skip_special_tokens=False), limiter=self._tokenizing
        )

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str | None:
        """As `ChatTemplate.render`; None where the model has no chat template."""
        prompts = self._prompts
        if prompts is None:
            return None
        return await anyio.to_thread.run_sync(
            lambda: prompts.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=kwargs,
                tools=tools,
            ),
            limiter=self._rendering,
        )
