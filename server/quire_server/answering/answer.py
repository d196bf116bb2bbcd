"""From a request's options to its reply: checked, run, and answered in one piece or as a stream.

Promises: every check that a 4xx can come from happens before anything is queued. Must not know: what is checked, the
shapes of replies, how tokens are made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
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
from quire_server.answering.reply_size import size_of_choices, size_of_prompts
from quire_server.answering.whole import collect, likeliest
from quire_server.errors import ApiError
from quire_server.http.disconnect import look_for_leaving, unless_client_gone
from quire_server.http.large_reply import PiecedReply
from quire_server.http.overload import has_arrived
from quire_server.http.sse import KEEP_ALIVE, EventStream
from quire_server.state import state_of
from quire_server.text.tokenizer import TextTokenizer

log = logging.getLogger("quire.requests")


class Renderer(Protocol):
    """The JSON of one dialect's replies to one request; a whole one is in pieces where it may be large.

    `failure` are the frames with which a stream ends that has begun and cannot go on.
    """

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes: ...
    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes | Iterator[bytes]: ...
    def failure(self, error: ApiError) -> bytes: ...


class MakeRenderer(Protocol):
    """A dialect's class of renderers, or what gives such a class more than every dialect needs."""

    def __call__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> Renderer: ...


async def answer(
    request: Request,
    options: GenerationOptions,
    renderer: MakeRenderer,
    *,
    gather: Callable[[Generation], Coroutine[object, object, list[ChoiceDelta]]] = collect,
    keep_alive: bytes = KEEP_ALIVE,
) -> Response:
    """The reply, whole or streamed; `gather` makes the deltas that a whole one is rendered from,
    `keep_alive` is what a silent stream says.

    Raises BadRequest, ContextLengthExceeded, QueueFull, EngineFailed, DeadlineExceeded, ClientGone.
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
        tokenizer=state.tokenizer,
        client=state.client,
        metrics=state.metrics,
        max_waiting=state.settings.stream_buffer_tokens if options.reply.stream else None,
    )
    head = ReplyHead(
        id=options.reply.id or request_id,
        created=int(time.time()),
        model=options.model or state.model_names[0],
        system_fingerprint=fingerprint(state.client.plan),
    )
    rendering = renderer(head, job, generation, tokenizer=state.tokenizer)
    if options.reply.stream:
        return EventStream(
            generation.deltas(),
            rendering.frames,
            progress=generation,
            failure=rendering.failure,
            headers=job.headers,
            keep_alive_seconds=state.settings.sse_keep_alive_interval,
            keep_alive=keep_alive,
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
    """What is to be run, for a client that is still there when nothing is left to be done but to run it."""
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
