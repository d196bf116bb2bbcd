"""Replies that are made of vectors: the vectors themselves, or how alike two of them are.

Promises: numbers and base64 of one text are the same float32 values; a long reply is put together piece by piece, so
that streams run meanwhile. Must not know: how vectors are computed, which dialect asked.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from operator import mul

import msgspec
from fastapi import Request
from fastapi.responses import Response

from quire_engine.types import GenerationRequest
from quire_server.answering.caller import caller_of
from quire_server.answering.notes import notes
from quire_server.answering.vector_options import VectorOptions
from quire_server.answering.vectors import VectorUsage, compute_vectors, prepare_vectors, shaped
from quire_server.http.disconnect import look_for_leaving, unless_client_gone
from quire_server.http.large_json import Pieces, pieces_of_object
from quire_server.http.large_reply import HeldReply, PiecedReply
from quire_server.http.overload import has_arrived
from quire_server.state import ServerState, state_of

_encode = msgspec.json.Encoder().encode
_AT_ONCE = 16  # scores, before others get a turn
_NUMBER_BYTES = 22  # of a reply, for each number of a vector
_TEXT_BYTES = 6  # the same in base64


async def answer_embeddings(request: Request, options: VectorOptions, *, as_text: bool) -> Response:
    """A vector for each text. Raises BadRequest, ContextLengthExceeded, QueueFull, EngineFailed, ClientGone."""
    state = state_of(request)
    headers = _notes(state, options)
    requests = await _prepared(request, options)
    size = state.client.plan.hidden_size if options.dimensions is None else options.dimensions
    held = state.replies.hold()
    held.grow(len(requests) * size * (_TEXT_BYTES if as_text else _NUMBER_BYTES))
    entries = [b""] * len(requests)

    def take(number: int, values: Sequence[float]) -> None:
        single = array("f", shaped(values, options))
        shown = _encode(_base64(single) if as_text else single.tolist())
        entries[number] = b'{"object":"embedding","index":%d,"embedding":%b}' % (number, shown)

    work = compute_vectors(requests, take, client=state.client, metrics=state.metrics)
    usage = await unless_client_gone(request, work)
    return _reply(request, options, entries, usage, prefix="embd-", headers=headers, held=held)


async def answer_scores(request: Request, options: VectorOptions, *, num_left: int) -> Response:
    """How alike the texts on the left, of which there are `num_left`, are to those on the right. Raises as above."""
    state = state_of(request)
    headers = _notes(state, options)
    requests = await _prepared(request, options)
    vectors: list[array[float]] = [array("d")] * len(requests)

    def take(number: int, values: Sequence[float]) -> None:
        vectors[number] = array("d", shaped(values, options))

    work = compute_vectors(requests, take, client=state.client, metrics=state.metrics)
    usage = await unless_client_gone(request, work)
    entries = []
    left, right = vectors[:num_left], vectors[num_left:]
    for number, other in enumerate(right):
        score = cosine(left[number if num_left > 1 else 0], other)
        entries.append(_encode({"object": "score", "index": number, "score": score}))
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return _reply(request, options, entries, usage, prefix="score-", headers=headers)


async def _prepared(request: Request, options: VectorOptions) -> list[GenerationRequest]:
    """The engine's requests, whose names are known from now on. Raises ClientGone beside the rest."""
    state = state_of(request)
    requests = await unless_client_gone(request, _checked(request, options))
    state.names.add((request.scope["state"]["request_id"], options.id), [each.request_id for each in requests])
    return requests


async def _checked(request: Request, options: VectorOptions) -> list[GenerationRequest]:
    requests = await prepare_vectors(state_of(request), options, caller_of(request))
    await look_for_leaving(request)
    has_arrived(request.scope)
    return requests


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the angle of two vectors of length 1, of which rounding makes no more than 1."""
    product: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, product))


def _base64(values: array[float]) -> str:
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def _notes(state: ServerState, options: VectorOptions) -> dict[str, str]:
    without_effect = list(options.ignored)
    if options.priority and state.client.plan.scheduler.limits.scheduling_policy != "priority":
        without_effect.append("priority")
    return notes(state, without_effect)


def _reply(
    request: Request,
    options: VectorOptions,
    entries: list[bytes],
    usage: VectorUsage,
    *,
    prefix: str,
    headers: dict[str, str],
    held: HeldReply | None = None,
) -> Response:
    head = {
        "id": prefix + (options.id or request.scope["state"]["request_id"]),
        "object": "list",
        "created": int(time.time()),
        "model": options.model or state_of(request).model_names[0],
    }
    tokens = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    fields = {**head, "data": Pieces(_list_of(entries)), "usage": tokens}
    return PiecedReply(pieces_of_object(fields), held=held, headers=headers)


def _list_of(entries: list[bytes]) -> Iterator[bytes]:
    """Each is let go of when it is sent."""
    start = b"["
    entries.reverse()
    while entries:
        yield start + entries.pop()
        start = b","
    yield b"]" if start == b"," else b"[]"
