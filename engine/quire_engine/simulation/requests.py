"""Turns rows of a load into requests for the engine, cheaply.

Promises: rows with equal block numbers get equal tokens there and nowhere else. Must not know: the scheduler.
"""

from __future__ import annotations

from functools import lru_cache

from quire_engine.simulation.traces import TraceRow
from quire_engine.types import GenerationRequest, SamplingParams, StopParams

_GREEDY = SamplingParams(temperature=0.0)
_OWN = 1 << 40  # above every block number: ids for tokens that no other row has


def as_request(row: TraceRow, number: int, *, at: float) -> GenerationRequest:
    """Request `number` of a load. Its output ends by its length."""
    return GenerationRequest(
        request_id=str(number),
        prompt_token_ids=prompt(row, number),
        sampling=_GREEDY,
        stop=_stop(row.output_tokens),
        arrival_time=at,
        cache_salt=f"{scope}\0" if (scope := row.scope or row.tenant) else "",  # as a server sets it
        tenant=row.tenant,
        weight=row.weight,
    )


def prompt(row: TraceRow, number: int) -> tuple[int, ...]:
    """The blocks by their numbers, then unique tokens; runs of one id, since only equality matters."""
    if not row.blocks:
        return (_OWN + number,) * row.input_tokens
    tokens: list[int] = []
    for block in row.blocks:
        tokens += [block] * row.block_tokens
    del tokens[row.input_tokens :]
    return (*tokens, *[_OWN + number] * (row.input_tokens - len(tokens)))


def number_of(prompt_token_ids: tuple[int, ...]) -> int:
    """The index of the request with this prompt, if it shares none of it."""
    return prompt_token_ids[-1] - _OWN


@lru_cache(maxsize=4096)
def _stop(output_tokens: int) -> StopParams:
    return StopParams(max_new_tokens=output_tokens)
