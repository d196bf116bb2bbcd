"""Answers one request: checks its options, runs the generation, sends the reply whole or as a stream.

Every check that can lead to a 4xx status happens before anything is queued.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from fastapi import Request
from fastapi.responses import Response

from quire_server.answering.caller import caller_of
from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.echoing import generation_class
from quire_server.answering.generation import Generation
from quire_server.answering.options import GenerationOptions
from quire_server.answering.prepare import Job, prepare
from quire_server.answering.rendering import ReplyHead, fingerprint
from quire_server.errors import ApiError
from quire_server.http.disconnect import look_for_leaving, unless_client_gone
from quire_server.http.large_reply import PiecedReply
from quire_server.http.overload import has_arrived
from quire_server.http.sse import EVENTS, KEEP_ALIVE, EventStream
from quire_server.state import state_of
from quire_server.text.logprobs import finite
from quire_server.text.tokenizer import TextTokenizer

_LOGPROB_BYTES = 72  # JSON bytes of one token's log-probability, estimated
_ID_BYTES = 8


def size_of_prompts(job: Job) -> int:
    """The approximate JSON size in bytes of the prompts' part of a reply, known in advance and never far too small.

    The objects that a reply is made of take about as much memory as its JSON.
    """
    reply = job.options.reply
    num_ids = sum(len(request.prompt_token_ids) for request in job.requests)
    size = sum(map(len, job.prompt_texts)) + (_ID_BYTES * num_ids if reply.token_ids else 0)
    if reply.num_prompt_logprobs is not None:
        size += num_ids * (reply.num_prompt_logprobs + 1) * _LOGPROB_BYTES
    return size


def size_of_choices(choices: Sequence[ChoiceDelta]) -> int:
    """The approximate JSON size in bytes of a reply's generated part."""
    size = 0
    for choice in choices:
        size += len(choice.text) + len(choice.reasoning) + _ID_BYTES * len(choice.token_ids)
        if choice.logprobs:
            alternatives = len(choice.logprobs[0].top_ids) + len(choice.logprobs[0].asked_ids)
            size += len(choice.logprobs) * (alternatives + 1) * _LOGPROB_BYTES
    return size


async def in_order(generation: Generation) -> list[ChoiceDelta]:
    """All deltas in the order in which they came."""
    async with aclosing(generation.deltas()) as wakes:
        return [delta async for deltas in wakes for delta in deltas]


async def collect(generation: Generation) -> list[ChoiceDelta]:
    """One delta per choice with all of its content, in the order of their index."""
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
    """The `count` choices of each prompt with the greatest mean log-probability, best first and renumbered.

    Ties go to the lower index. The choices must have the log-probabilities of their tokens.
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


log = logging.getLogger("quire.requests")


class Renderer(Protocol):
    """The JSON of one dialect's replies to one request; `body` yields pieces where a reply may be large.

    `failure`: the frames that end a stream after an error. `around_text`: the bytes before and after the text's JSON in
    a frame of a stream with one choice, after its first one; None: such a frame has more, or other, parts.
    """

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes: ...
    def around_text(self) -> tuple[bytes, bytes] | None: ...
    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes | Iterator[bytes]: ...
    def failure(self, error: ApiError) -> bytes: ...


class MakeRenderer(Protocol):
    """Makes a dialect's renderer: its class, or a function that gives the class further arguments."""

    def __call__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> Renderer: ...


async def answer(
    request: Request,
    options: GenerationOptions,
    renderer: MakeRenderer,
    *,
    gather: Callable[[Generation], Coroutine[object, object, list[ChoiceDelta]]] = collect,
    keep_alive: bytes = KEEP_ALIVE,
    media_type: str = EVENTS,
) -> Response:
    """The reply, whole or streamed.

    `gather` makes the deltas of a whole reply; `keep_alive` is sent while a stream, which has `media_type`, is silent:
    nothing is, if it is empty. Raises BadRequest,
    ContextLengthExceeded, QueueFull, EngineFailed, DeadlineExceeded, ClientGone.
    """
    state = state_of(request)
    job = await unless_client_gone(request, _prepared(request, options))
    request_id = request.scope["state"]["request_id"]
    state.names.add((request_id, options.reply.id), [each.request_id for each in job.requests])
    if state.settings.enable_log_requests:
        _log(job, request_id)
    generation = generation_class(job)(
        job.requests,
        job.text,
        tokenizer=state.model_text.tokenizer,
        client=state.client,
        metrics=state.metrics,
        max_waiting=state.limits.stream_buffer_tokens if options.reply.stream else None,
    )
    head = ReplyHead(
        id=options.reply.id or request_id,
        created=int(time.time()),
        model=options.model or state.model_names[0],
        system_fingerprint=fingerprint(state.client.plan, job.requests[0].adapter),
    )
    rendering = renderer(head, job, generation, tokenizer=state.model_text.tokenizer)
    if options.reply.stream:
        return EventStream(
            generation.deltas(),
            rendering.frames,
            progress=generation,
            failure=rendering.failure,
            headers=job.headers,
            keep_alive_seconds=state.limits.sse_keep_alive_interval if keep_alive else 0.0,
            keep_alive=keep_alive,
            media_type=media_type,
            on_way=lambda way: generation.way(way, rendering.frames, rendering.around_text()),
        )
    held = state.replies.hold()
    try:
        held.grow(size_of_prompts(job))
        choices = await unless_client_gone(request, gather(generation))
        if options.reply.keep_best is not None:
            choices = likeliest(choices, options.reply.keep_best)
        held.grow(size_of_choices(choices))
        body = rendering.body(choices)
    except BaseException:
        held.release()
        raise
    return PiecedReply((body,) if isinstance(body, bytes) else body, held=held, headers=job.headers)


async def _prepared(request: Request, options: GenerationOptions) -> Job:
    """The checked job; raises if the client has disconnected by the time it is ready to run."""
    job = await prepare(state_of(request), options, caller_of(request))
    await look_for_leaving(request)
    has_arrived(request.scope)
    return job


def _log(job: Job, request_id: str) -> None:
    for request in job.requests:
        log.info(
            "%d prompt tokens, n %d, max_tokens %d, %s",
            len(request.prompt_token_ids),
            request.n,
            request.stop.max_new_tokens,
            request.sampling,
            extra={"request_id": request_id},
        )
