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

import msgspec
from fastapi import Request
from fastapi.responses import Response

from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams, TokenOutput
from quire_server.answering.caller import Caller, caller_of
from quire_server.answering.generation import error_of
from quire_server.answering.prepare import adapter_header, notes
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
from quire_server.text.pooling_method import PoolingMethod


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
    normalize: bool | None = None  # to L2 norm 1; None: as the checkpoint says
    prompt_name: str | None = None  # the checkpoint's prompt that is put before each text; None: its default one
    answers: tuple[int, ...] = ()  # instead of a vector: the log-probabilities of these tokens after the text
    priority: int = 0  # lower is earlier, under the priority policy
    timeout: float | None = None  # seconds; None: no limit
    is_batch: bool = False  # service class batch
    cache_salt: str = ""
    cache_ttl: float = 0.0  # as `PromptOptions.cache_ttl`
    ignored: tuple[str, ...] = ()  # names of fields that were accepted without effect


_encode = msgspec.json.Encoder().encode
_NUMBER_BYTES = 22  # JSON bytes per number of a vector
_TEXT_BYTES = 6  # base64 bytes per number


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLists:
    """The embeddings of a request's texts, each as JSON, with the usage and the reply's headers."""

    entries: list[bytes]
    usage: VectorUsage
    headers: dict[str, str]
    held: HeldReply

    def pieces(self) -> Iterator[bytes]:
        """One JSON list of all."""
        return _list_of(self.entries)


async def embedding_lists(
    request: Request,
    options: VectorOptions,
    *,
    as_text: bool = False,
    entry: Callable[[int, bytes], bytes] = lambda _number, vector: vector,
) -> EmbeddingLists:
    """The embeddings of the texts; JSON numbers and base64 are of the same float32 values.

    `entry` puts a text's number and its vector into the dialect's form. Raises BadRequest, ContextLengthExceeded,
    QueueFull, EngineFailed, ClientGone.
    """
    state = state_of(request)
    headers = vector_notes(state, options)
    requests = await prepared(request, options)
    method = state.model_text.pooling
    size = options.dimensions or method.size(state.client.plan.model.hidden_size)
    held = state.replies.hold()
    held.grow(len(requests) * size * (_TEXT_BYTES if as_text else _NUMBER_BYTES))
    entries = [b""] * len(requests)

    def take(number: int, values: Sequence[float]) -> None:
        single = array("f", shaped(values, options, method))
        shown = _encode(_base64(single) if as_text else single.tolist())
        entries[number] = entry(number, shown)

    work = compute_vectors(requests, take, client=state.client, metrics=state.metrics)
    usage = await unless_client_gone(request, work)
    headers |= adapter_header(requests[0].adapter)
    return EmbeddingLists(entries=entries, usage=usage, headers=headers, held=held)


def _openai_entry(number: int, vector: bytes) -> bytes:
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (number, vector)


async def answer_embeddings(request: Request, options: VectorOptions, *, as_text: bool) -> Response:
    """The embeddings of the texts in OpenAI's form. Raises as `embedding_lists` does."""
    made = await embedding_lists(request, options, as_text=as_text, entry=_openai_entry)
    return vector_reply(
        request, options, made.entries, made.usage, prefix="embd-", headers=made.headers, held=made.held
    )


async def prepared(request: Request, options: VectorOptions) -> list[GenerationRequest]:
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


def _base64(values: array[float]) -> str:
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def vector_notes(state: ServerState, options: VectorOptions) -> dict[str, str]:
    without_effect = list(options.ignored)
    if options.priority and state.client.plan.scheduler.limits.scheduling_policy != "priority":
        without_effect.append("priority")
    return notes(state, without_effect)


def vector_reply(
    request: Request,
    options: VectorOptions,
    entries: list[bytes],
    usage: VectorUsage,
    *,
    prefix: str,
    headers: dict[str, str],
    held: HeldReply | None = None,
    name: str = "data",
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
    fields = {**head, name: Pieces(_list_of(entries)), "usage": tokens}
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


def shaped(values: Sequence[float], options: VectorOptions, method: PoolingMethod) -> list[float]:
    """The vector of a pooled row, cut to the requested length, then normalised unless it is all zeros."""
    values = method.project(values)
    kept = values if options.dimensions is None else values[: options.dimensions]
    normalizes = method.normalizes if options.normalize is None else options.normalize
    length = math.hypot(*kept) if normalizes else 0.0
    return [value / length for value in kept] if length else list(kept)


async def prepare_vectors(
    state: ServerState, options: VectorOptions, caller: Caller | None = None
) -> list[GenerationRequest]:
    """An engine request for each text. Raises BadRequest, ContextLengthExceeded."""
    method = state.model_text.pooling
    if method.name == "none" and not options.answers:
        raise BadRequest(f"This server makes no embeddings: {method.reason}.", code="embeddings_not_supported")
    size = method.size(state.client.plan.model.hidden_size)
    if options.dimensions is not None and options.dimensions > size:
        raise BadRequest(f"'dimensions' is at most {size} for this model.", param="dimensions")
    limits = ModelLimits.of(state.client.plan, state.model_text.tokenizer, state.settings.max_logprobs)
    adapter = state.adapters.bound(options.model)
    by_priority = limits.scheduler.limits.scheduling_policy == "priority"
    requests: list[GenerationRequest] = []
    caller = caller or Caller()
    total = 0
    prompt = _prompt(method, options)
    asked = SamplingParams(temperature=0.0)
    if options.answers:
        asked = replace(asked, num_logprobs=0, logprob_token_ids=options.answers)
    for each in options.inputs:
        if prompt and isinstance(each.source, str):
            each = replace(each, source=prompt + each.source)  # noqa: PLW2901
        token_ids = await _token_ids(state, each, options, limits)
        total += len(token_ids)
        if total > MAX_INPUT_TOKENS:
            raise BadRequest(f"A request may have {MAX_INPUT_TOKENS} tokens in all texts.", param=each.param)
        request = GenerationRequest(
            request_id=secrets.token_hex(12),
            prompt_token_ids=tuple(token_ids),
            sampling=asked,
            stop=StopParams(max_new_tokens=1 if options.answers else 0),
            priority=options.priority if by_priority else 0,
            cache_salt=options.cache_salt,
            cache_ttl=options.cache_ttl,
            pooling="" if options.answers or method.name == "none" else method.name,
        )
        request = request.bound_to(adapter)
        requests.append(caller.claim(request, timeout=options.timeout, is_batch=options.is_batch))
        await asyncio.sleep(0)  # let streams run between thousands of short texts
    return requests


def _prompt(method: PoolingMethod, options: VectorOptions) -> str:
    """The text before each of the request's texts. Raises BadRequest."""
    if options.prompt_name is None:
        return method.default_prompt
    if options.prompt_name not in method.prompts:
        known = ", ".join(sorted(method.prompts)) or "none"
        raise BadRequest(f"The checkpoint has no prompt of this name; it has {known}.", param="prompt_name")
    return method.prompts[options.prompt_name]


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
    """The vector of a request's only output, or the log-probabilities that were asked for."""
    if output.timing is not None:
        record.timing(output.timing)
    found = output.embedding
    if found is None and output.logprobs:
        found = output.logprobs[0].asked_logprobs
    if found is None:
        record.finish("error")
        raise error_of(output)
    record.cached(output.num_cached_tokens)
    record.finish("stop")
    return found


async def _token_ids(state: ServerState, each: TextInput, options: VectorOptions, limits: ModelLimits) -> Sequence[int]:
    keep = limits.scheduler.max_model_len if options.keep_tokens == -1 else options.keep_tokens
    token_ids: Sequence[int]
    is_text = isinstance(each.source, str)
    least = state.model_text.tokenizer.least_tokens(len(each.source)) if is_text else len(each.source)
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
    least = 1 if options.answers else 0
    if len(token_ids) + least > most or limits.scheduler.largest_max_tokens(num_prompt=len(token_ids), n=1) < least:
        most = min(most, limits.scheduler.longest)
        raise _too_long(most, str(len(token_ids)), each.param)
    return token_ids


def _too_long(most: int, tokens: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"The model takes at most {most} tokens here, but the text has {tokens}; 'truncate_prompt_tokens' cuts it.",
        param=param,
    )


def _cut(whole: Sequence[int], plain: Sequence[int], keep: int, *, keep_start: bool) -> list[int]:
    """Cut the ids of a text to `keep` tokens; the special tokens around the text keep their places.

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
