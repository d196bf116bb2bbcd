"""A generation as one piece: all of each choice's deltas put together.

Promises: the same text, ids and log-probabilities that a stream carries in pieces; the engine's work ends with the
call. Must not know: HTTP, JSON, who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Generation
from quire_server.text.logprobs import finite


async def in_order(generation: Generation) -> list[ChoiceDelta]:
    """Every delta as it came, for replies in which what came first stands first."""
    async with aclosing(generation.deltas()) as wakes:
        return [delta async for deltas in wakes for delta in deltas]


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
                    known.beam_score = delta.beam_score
    return [replace(whole[index], text="".join(texts[index])) for index in sorted(whole)]


def likeliest(choices: Sequence[ChoiceDelta], count: int) -> list[ChoiceDelta]:
    """Of each prompt the choices whose tokens have the greatest mean log-probability, best first and counted anew.

    Of equals the one with the lower number. They must have the log-probabilities of their tokens.
    """
    kept = []
    for prompt in dict.fromkeys(choice.prompt for choice in choices):
        own = sorted((choice for choice in choices if choice.prompt == prompt), key=_mean_logprob, reverse=True)
        kept += [replace(choice, index=prompt * count + place) for place, choice in enumerate(own[:count])]
    return kept


def _mean_logprob(choice: ChoiceDelta) -> float:
    if not choice.logprobs:
        return 0.0
    return sum(finite(token.logprob) for token in choice.logprobs) / len(choice.logprobs)
