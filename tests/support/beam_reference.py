"""Beam search in plain Python over any source of likeliest tokens, without lanes, blocks or steps.

Promises: the rules of transformers' `generate` with doubles, one prompt at a time; of equal totals the beam that ranked
before, then the earlier token of its list. Must not know: the engine's own search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire_engine.contract.types import GenerationRequest

Likeliest = Callable[
    [tuple[int, ...]], Sequence[tuple[int, float]]
]  # tokens so far -> (token, log-probability), best first
Found = tuple[tuple[int, ...], float, str]  # output tokens, score, how it ended


def search(wanted: GenerationRequest, likeliest: Likeliest) -> list[Found]:
    """The finished beams of a request, best first, as many as it returns."""
    assert wanted.beam is not None
    width, penalty, early = wanted.beam.width, wanted.beam.length_penalty, wanted.beam.early_stopping
    stops, most = set(wanted.stop.stop_token_ids), wanted.stop.max_new_tokens
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[Found] = []
    for length in range(1, most + 1):
        continued = []
        for tokens, total in live:
            for token, logprob in likeliest((*wanted.prompt_token_ids, *tokens)):
                if token not in stops or length > wanted.sampling.min_tokens:
                    continued.append(((*tokens, token), total + logprob))
        continued.sort(key=lambda each: -each[1])
        for tokens, total in continued[:width]:
            if length == most or tokens[-1] in stops:
                finished.append((tokens, total / length**penalty, "stop" if tokens[-1] in stops else "length"))
        finished = sorted(finished, key=lambda each: -each[1])[:width]
        live = [each for each in continued if each[0][-1] not in stops][:width]
        if len(finished) == width:
            reach = most if early == "never" and penalty > 0 else length
            if early is True or not live[0][1] / reach**penalty > finished[-1][1]:
                break
    return finished[: wanted.n]
