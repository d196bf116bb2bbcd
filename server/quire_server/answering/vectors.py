"""Answers requests for embeddings and scores: one engine request per text, after every check.

A list that is longer than the queue is submitted in pieces; when the call ends, its engine requests end too.
"""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul

import msgspec
from fastapi import Request
from fastapi.responses import Response

from quire_engine.types import GenerationRequest, SamplingParams, StopParams, TokenOutput
from quire_server.answering.caller import Caller, caller_of
from quire_server.answering.generation import error_of
from quire_server.answering.prepare import notes
from quire_server.answering.sampling import ModelLimits
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.errors import BadRequest, ContextLengthExceeded, EngineFailed, QueueFull
from quire_server.http.disconnect import look_for_leaving, unless_client_gone
from quire_server.http.json_text import Pieces, pieces_of_object
from quire_server.http.large_reply import HeldReply, PiecedReply
from quire_server.http.overload import has_arrived
from quire_server.metrics.metrics import Metrics
from quire_server.metrics.request_record import RequestRecord
from quire_server.state import ServerState, state_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInput:
    """One text to embed."""

    source: str | Sequence[int]
    param: str  # the field's name in the dialect, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions:
    """One request's texts to embed, in any dialect."""

    inputs: Sequence[TextInput]
    model: str | None = None  # None: the one that is served
    id: str | None = None  # id of the reply; None: the HTTP request's
    add_special_tokens: bool = True
    keep_tokens: int | None = None  # most tokens of each text; -1: the context length
    keep_start: bool = True  # keep the start of a text that is cut, else its end
    dimensions: int | None = None  # length to cut vectors to, for models trained for that (Matryoshka)
    normalize: bool = True  # to L2 norm 1
    priority: int = 0  # lower is earlier, under the priority policy
    timeout: float | None = None  # seconds; None: no limit
    is_batch: bool = False  # service class batch
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()  # names of fields that were accepted without effect


_encode = msgspec.json.Encoder().encode
_AT_ONCE = 16  # scores between two yields to the event loop
_NUMBER_BYTES = 22  # JSON bytes per number of a vector
_TEXT_BYTES = 6  # base64 bytes per number


async def answer_embeddings(request: Request, options: VectorOptions, *, as_text: bool) -> Response:
    """The embeddings of the texts; JSON numbers and base64 are of the same float32 values.

    Raises BadRequest, ContextLengthExceeded, QueueFull, EngineFailed, ClientGone.
    """
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
    """The cosine similarities of the first `num_left` texts with the others. Raises as `answer_embeddings`."""
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
    """The checked engine requests, registered under the client's names. Raises ClientGone beside the rest."""
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
    """The cosine similarity of two vectors of length 1, clamped against rounding."""
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
    """The reply, encoded piece by piece, so that streams run meanwhile."""
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
    """A JSON list in pieces; each entry is freed when it is sent."""
    start = b"["
    entries.reverse()
    while entries:
        yield start + entries.pop()
        start = b","
    yield b"]" if start == b"," else b"[]"


MAX_INPUT_TOKENS = 1 << 20  # of all texts of a request
_ROOM_SECONDS = 0.05  # pause before the next attempt while the queue is full


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorUsage:
    """Token counts over all texts."""

    prompt_tokens: int
    cached_tokens: int


def shaped(values: Sequence[float], options: VectorOptions) -> list[float]:
    """The vector cut to the requested length, then normalised unless it is all zeros."""
    kept = values if options.dimensions is None else values[: options.dimensions]
    length = math.hypot(*kept) if options.normalize else 0.0
    return [value / length for value in kept] if length else list(kept)


async def prepare_vectors(
    state: ServerState, options: VectorOptions, caller: Caller | None = None
) -> list[GenerationRequest]:
    """An engine request for each text. Raises BadRequest, ContextLengthExceeded."""
    method = state.pooling
    if method.name == "none":
        raise BadRequest(f"This server makes no embeddings: {method.reason}.", code="embeddings_not_supported")
    size = state.client.plan.hidden_size
    if options.dimensions is not None and options.dimensions > size:
        raise BadRequest(f"'dimensions' is at most {size} for this model.", param="dimensions")
    limits = ModelLimits.of(state.client.plan, state.tokenizer, state.settings.max_logprobs)
    by_priority = limits.scheduler.limits.scheduling_policy == "priority"
    requests: list[GenerationRequest] = []
    caller = caller or Caller()
    total = 0
    for each in options.inputs:
        token_ids = await _token_ids(state, each, options, limits)
        total += len(token_ids)
        if total > MAX_INPUT_TOKENS:
            raise BadRequest(f"A request may have {MAX_INPUT_TOKENS} tokens in all texts.", param=each.param)
        request = GenerationRequest(
            request_id=secrets.token_hex(12),
            prompt_token_ids=tuple(token_ids),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=0),
            priority=options.priority if by_priority else 0,
            cache_salt=options.cache_salt,
            pooling=method.name,
        )
        requests.append(caller.claim(request, timeout=options.timeout, is_batch=options.is_batch))
        await asyncio.sleep(0)  # let streams run between thousands of short texts
    return requests


async def compute_vectors(
    requests: Sequence[GenerationRequest],
    take: Callable[[int, tuple[float, ...]], None],
    *,
    client: EngineClient,
    metrics: Metrics,
) -> VectorUsage:
    """Compute the vectors; calls `take(number, vector)` as each comes. Raises QueueFull before the first, EngineFailed.

    At most as many requests as the engine has seats are submitted at once, so that a long list leaves the queue to
    others.
    """
    client.check_budgets(requests)
    stream = RequestStream(client)
    waiting = deque(enumerate(requests))
    live: dict[str, tuple[int, RequestRecord]] = {}
    cached_tokens = 0
    failed = False
    try:
        while waiting or live:
            _feed(waiting, live, stream, client=client, metrics=metrics)
            if not live:
                await asyncio.sleep(_ROOM_SECONDS)
                continue
            for output in await anext(stream):
                number, record = live.pop(output.request_id)
                vector = _ended(output, record)
                cached_tokens += output.num_cached_tokens
                take(number, vector)
    except EngineFailed:
        failed = True
        raise
    finally:
        stream.close()
        for _, record in live.values():
            record.finish("error" if failed else "abort")
    return VectorUsage(
        prompt_tokens=sum(len(request.prompt_token_ids) for request in requests), cached_tokens=cached_tokens
    )


def _feed(
    waiting: deque[tuple[int, GenerationRequest]],
    live: dict[str, tuple[int, RequestRecord]],
    stream: RequestStream,
    *,
    client: EngineClient,
    metrics: Metrics,
) -> None:
    seats = client.plan.scheduler.limits.max_num_seqs
    while waiting and len(live) < seats:
        number, request = waiting[0]
        if number and not client.has_room(request):  # only the first one may be refused
            return
        try:
            client.submit(replace(request, arrival_time=time.monotonic()), stream)
        except QueueFull:
            if number:
                return  # above its tenant's rate in the middle of a list: retried later
            raise
        waiting.popleft()
        record = metrics.start(
            prompt_tokens=len(request.prompt_token_ids), max_tokens=None, n=1, request_id=request.request_id
        )
        live[request.request_id] = number, record


def _ended(output: TokenOutput, record: RequestRecord) -> tuple[float, ...]:
    """The vector of a request's only output."""
    if output.timing is not None:
        record.timing(output.timing)
    if output.embedding is None:
        record.finish("error")
        raise error_of(output)
    record.cached(output.num_cached_tokens)
    record.finish("stop")
    return output.embedding


async def _token_ids(state: ServerState, each: TextInput, options: VectorOptions, limits: ModelLimits) -> Sequence[int]:
    keep = limits.scheduler.max_model_len if options.keep_tokens == -1 else options.keep_tokens
    token_ids: Sequence[int]
    is_text = isinstance(each.source, str)
    least = state.tokenizer.least_tokens(len(each.source)) if is_text else len(each.source)
    if keep is None and least > limits.scheduler.max_model_len:
        raise _too_long(limits.scheduler.max_model_len, f"{'at least ' if is_text else ''}{least}", each.param)
    if isinstance(each.source, str):
        token_ids = await state.text.encode(each.source, add_special_tokens=options.add_special_tokens)
        if keep is not None and len(token_ids) > keep:
            plain = await state.text.encode(each.source, add_special_tokens=False)
            token_ids = _cut(token_ids, plain, keep, keep_start=options.keep_start)
    else:
        limits.check_ids(each.source, each.param)
        token_ids = each.source if keep is None else _cut(each.source, each.source, keep, keep_start=options.keep_start)
    if not token_ids:
        raise BadRequest("The text is empty: it has no tokens.", param=each.param)
    most = limits.scheduler.max_model_len
    if len(token_ids) > most or limits.scheduler.largest_max_tokens(num_prompt=len(token_ids), n=1) < 0:
        most = min(most, limits.scheduler.num_slots)
        raise _too_long(most, str(len(token_ids)), each.param)
    return token_ids


def _too_long(most: int, tokens: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"The model takes at most {most} tokens here, but the text has {tokens}; 'truncate_prompt_tokens' cuts it.",
        param=param,
    )


def _cut(whole: Sequence[int], plain: Sequence[int], keep: int, *, keep_start: bool) -> list[int]:
    """At most `keep` tokens, with the special tokens that the tokenizer puts around a text in their places.

    Models that pool the last token's row are trained with an end-of-text token there.
    """
    around = len(whole) - len(plain)
    before = next((i for i in range(around + 1) if list(whole[i : i + len(plain)]) == list(plain)), None)
    if before is None or around >= keep:
        before, around, plain = 0, 0, whole
    left = max(keep - around, 0)
    text = plain[:left] if keep_start else plain[max(len(plain) - left, 0) :]
    end = before + len(plain)
    return [*whole[:before], *text, *whole[end:]]
