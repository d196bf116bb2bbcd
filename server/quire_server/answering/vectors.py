"""Texts as vectors: every check before anything is queued, then one engine request for each text.

Promises: vectors in the order of the texts, whatever the order in which they are computed; a list that is longer than
the queue is fed to it in pieces; the engine's work ends with the call. Must not know: dialects, HTTP, JSON.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire_engine.types import GenerationRequest, SamplingParams, StopParams, TokenOutput
from quire_server.answering.caller import Caller
from quire_server.answering.endings import error_of
from quire_server.answering.sampling import ModelLimits
from quire_server.answering.vector_options import TextInput, VectorOptions
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.errors import BadRequest, ContextLengthExceeded, EngineFailed, QueueFull
from quire_server.metrics.metrics import Metrics
from quire_server.metrics.request_record import RequestRecord
from quire_server.state import ServerState

MAX_INPUT_TOKENS = 1 << 20  # of all texts of a request
_ROOM_SECONDS = 0.05  # others have taken the queue: ask again


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorUsage:
    """Tokens of all texts."""

    prompt_tokens: int
    cached_tokens: int


def shaped(values: Sequence[float], options: VectorOptions) -> list[float]:
    """The vector as it was asked for: cut, then of length 1 unless it is all zeros."""
    kept = values if options.dimensions is None else values[: options.dimensions]
    length = math.hypot(*kept) if options.normalize else 0.0
    return [value / length for value in kept] if length else list(kept)


async def prepare_vectors(
    state: ServerState, options: VectorOptions, caller: Caller | None = None
) -> list[GenerationRequest]:
    """A request for each text. Raises BadRequest, ContextLengthExceeded."""
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
        await asyncio.sleep(0)  # thousands of short texts are a long one: let streams run between them
    return requests


async def compute_vectors(
    requests: Sequence[GenerationRequest],
    take: Callable[[int, tuple[float, ...]], None],
    *,
    client: EngineClient,
    metrics: Metrics,
) -> VectorUsage:
    """Tell `take` each text's number and vector as it comes. Raises QueueFull before anything runs, EngineFailed.

    No more than the engine's seats are taken at once, so that a long list leaves the queue to others.
    """
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
        if number and not client.has_room(request):  # the first is refused as any request is
            return
        try:
            client.submit(replace(request, arrival_time=time.monotonic()), stream)
        except QueueFull:
            if number:
                return  # over its tenant's rate in the middle of a list: asked again later
            raise
        waiting.popleft()
        record = metrics.start(
            prompt_tokens=len(request.prompt_token_ids), max_tokens=None, n=1, request_id=request.request_id
        )
        live[request.request_id] = number, record


def _ended(output: TokenOutput, record: RequestRecord) -> tuple[float, ...]:
    """The vector of a request's only output, which is its end."""
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
    """At most `keep` tokens, with the special ones that the tokenizer puts around a text where they were.

    Models whose last token's row is the vector are trained with an end-of-text token there.
    """
    around = len(whole) - len(plain)
    before = next((i for i in range(around + 1) if list(whole[i : i + len(plain)]) == list(plain)), None)
    if before is None or around >= keep:
        before, around, plain = 0, 0, whole
    left = max(keep - around, 0)
    text = plain[:left] if keep_start else plain[max(len(plain) - left, 0) :]
    end = before + len(plain)
    return [*whole[:before], *text, *whole[end:]]
