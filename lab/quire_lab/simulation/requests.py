"""Turns rows of a load into requests for the engine, cheaply, and knows the tokens that they sample.

Promises: rows with equal block numbers get equal tokens there and nowhere else, also not in their outputs. Must not
know: the scheduler.
"""

from __future__ import annotations

from functools import lru_cache

from quire_bench.traces import TraceRow
from quire_engine.contract.batch import SampledToken
from quire_engine.contract.decodes import DecodeRow, Decodes
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_lab.simulation.contents import STOP
from quire_lab.simulation.outcome import Served

_GREEDY = SamplingParams(temperature=0.0)
_OWN = 1 << 40  # above every block number: ids for tokens that no other row has
LAST_TOKEN = (SampledToken(token_id=STOP),)


def as_request(row: TraceRow, number: int, *, at: float, max_model_len: int) -> GenerationRequest:
    """Request `number` of a load. Its output ends by its length, or with `max_tokens` by a stop token.

    `max_tokens` is lowered to the context's length, as a server does, but not below the true length.
    """
    room = row.output_tokens if row.max_tokens is None else min(row.max_tokens, max_model_len - row.input_tokens)
    return GenerationRequest(
        request_id=str(number),
        prompt_token_ids=prompt(row, number),
        sampling=_GREEDY,
        stop=_stop(max(row.output_tokens, room), row.max_tokens is not None),
        arrival_time=at,
        cache_salt=f"{scope}\0" if (scope := row.scope or row.tenant) else "",  # as a server sets it
        tenant=row.tenant,
        weight=row.weight,
    )


@lru_cache(maxsize=4)
def prompt(row: TraceRow, number: int) -> tuple[int, ...]:
    """The blocks by their numbers, then unique tokens; runs of one id, since only equality matters."""
    if not row.blocks:
        return (_OWN + number,) * row.input_tokens
    tokens: list[int] = []
    for block in row.blocks:
        tokens += [block] * row.block_tokens
    del tokens[row.input_tokens :]
    return (*tokens, *[_OWN + number] * (row.input_tokens - len(tokens)))


def own_token(number: int) -> tuple[SampledToken, ...]:
    """The sample of each output token of a request but the last."""
    return (SampledToken(token_id=_OWN + number),)


def number_of(prompt_token_ids: tuple[int, ...]) -> int:
    """The index of the request with this prompt, if it shares none of it."""
    return prompt_token_ids[-1] - _OWN


@lru_cache(maxsize=4096)
def _stop(max_new_tokens: int, ends_by_token: bool) -> StopParams:
    return StopParams(max_new_tokens=max_new_tokens, stop_token_ids=(STOP,) if ends_by_token else ())


class DecodingRows:
    """Knows of each live sequence the token that it repeats, and the position whose sample is its last."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}  # by sequence
        self._rows: tuple[DecodeRow, ...] = ()  # of the step before
        self._of_rows: list[tuple[int, int]] = []  # the same of these rows

    def note(self, sequence_id: int, num_prompt_tokens: int, served: Served) -> None:
        """A sequence has a sample, as every one has before it comes into the columns."""
        if sequence_id not in self._known:
            (own,), last = own_token(served.number), num_prompt_tokens + served.row.output_tokens - 2
            self._known[sequence_id] = own.token_id, last

    def tokens(self, decodes: Decodes) -> list[int]:
        """The next token of each row: [N]."""
        if decodes.rows is not self._rows:
            self._rows = decodes.rows
            self._of_rows = [self._known[row.sequence_id] for row in decodes.rows]
        positions = decodes.positions.tolist()
        return [STOP if at == last else own for at, (own, last) in zip(positions, self._of_rows, strict=True)]
