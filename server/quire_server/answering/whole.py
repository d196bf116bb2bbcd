"""A generation as one piece: all of each choice's deltas put together.

Promises: the same text, ids and log-probabilities that a stream carries in pieces; the engine's work ends with the
call. Must not know: HTTP, JSON, who asks.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

from quire_server.answering.generation import ChoiceDelta, Generation


async def collect(generation: Generation) -> list[ChoiceDelta]:
    """Every choice whole, in order of their index."""
    whole: dict[int, ChoiceDelta] = {}
    texts: dict[int, list[str]] = {}
    async with aclosing(generation.deltas()) as wakes:
        async for deltas in wakes:
            for delta in deltas:
                known = whole.setdefault(delta.index, delta)
                texts.setdefault(delta.index, []).append(delta.text)
                if known is not delta:
                    known.reasoning += delta.reasoning
                    known.calls += delta.calls
                    known.token_ids += delta.token_ids
                    known.logprobs += delta.logprobs
                    known.offsets += delta.offsets
                    known.finish_reason = delta.finish_reason
                    known.stop_reason = delta.stop_reason
    return [replace(whole[index], text="".join(texts[index])) for index in sorted(whole)]
