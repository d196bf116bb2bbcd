"""What both generation routes do around a prompt: admit the request, run it, answer in one piece or as a stream.

Promises: what is accepted but has no effect is named in `x-quire-ignored`, what was lowered in `x-quire-clamped`.
Must not know: prompts, chat templates, the shapes of replies.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from quire_engine.types import GenerationRequest, SamplingParams, StopParams
from quire_server.answering.generation import ChoiceDelta, Generation, TextOptions
from quire_server.answering.rendering import ReplyHead, ReplyOptions, fingerprint
from quire_server.answering.sampling import Clamp, ModelLimits, resolve_sampling, resolve_stop, with_seed
from quire_server.errors import BadRequest, ModelNotFound, NotReady
from quire_server.http.disconnect import unless_client_gone
from quire_server.http.sse import EventStream
from quire_server.state import ServerState
from quire_server.wire.common import GenerationFields
from quire_server.wire.extras import header_list, review_extras

log = logging.getLogger("quire.requests")

LEAST_ROOM = 1  # tokens kept free for the answer when a prompt is cut to the context length


class Renderer(Protocol):
    """The JSON of one endpoint."""

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes: ...
    def ending(self) -> bytes: ...
    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimit:
    """How many tokens a request asks for, and under which name."""

    param: str
    asked: int | None
    default: int | None  # None: all that fits
    prompt_param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that has passed every check. Nothing has been queued yet."""

    requests: tuple[GenerationRequest, ...]
    text: TextOptions
    headers: dict[str, str]


def admit(state: ServerState, fields: GenerationFields) -> list[str]:
    """The checks that need no prompt. Returns the names of fields without effect.

    Raises NotReady, ModelNotFound, BadRequest.
    """
    if state.draining:
        state.metrics.reject("draining")
        raise NotReady("The server is shutting down.", close=True)
    if not state.knows_model(fields.model):
        raise ModelNotFound(fields.model or "")
    ignored = review_extras(fields.model_extra)
    if fields.stream_options is not None:
        if not fields.wants_stream:
            raise BadRequest("'stream_options' needs 'stream': true.", param="stream_options")
        ignored += [f"stream_options.{name}" for name in review_extras(fields.stream_options.model_extra)]
    if fields.wants_stream and fields.prompt_logprobs is not None:
        raise BadRequest("'prompt_logprobs' cannot be streamed.", param="prompt_logprobs")
    if fields.priority and state.client.plan.scheduler.policy != "priority":
        ignored.append("priority")
    return ignored


def limits_of(state: ServerState) -> ModelLimits:
    return ModelLimits.of(state.client.plan, state.tokenizer, state.settings.max_logprobs)


def cut_prompt(token_ids: list[int], fields: GenerationFields, state: ServerState, tokens: TokenLimit) -> list[int]:
    """`truncate_prompt_tokens`: the prompt's last (or first) tokens; -1 leaves room for the answer asked for."""
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        wanted = tokens.asked if tokens.asked is not None else tokens.default or LEAST_ROOM
        keep = max(state.max_model_len - max(wanted, LEAST_ROOM), 1)
    return token_ids[:keep] if fields.truncation_side == "right" else token_ids[max(len(token_ids) - keep, 0) :]


def prepare(
    state: ServerState,
    fields: GenerationFields,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: TokenLimit,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    ignored: list[str],
) -> Job:
    """Check prompts and parameters against the model and the pool. Raises BadRequest, ContextLengthExceeded."""
    limits = limits_of(state)
    sampling = resolve_sampling(
        fields,
        tokenizer=state.tokenizer,
        limits=limits,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    requests: list[GenerationRequest] = []
    clamps: list[Clamp] = []
    for token_ids in prompts:
        if not token_ids:
            raise BadRequest("The prompt is empty: it has no tokens.", param=tokens.prompt_param)
        stop, clamp = resolve_stop(
            fields,
            sampling,
            prompt_tokens=len(token_ids),
            prompt_param=tokens.prompt_param,
            asked=tokens.asked,
            asked_param=tokens.param,
            default=tokens.default,
            tokenizer=state.tokenizer,
            limits=limits,
        )
        seeded = with_seed(sampling, requested=fields.seed, server_seed=state.settings.seed, token_ids=token_ids)
        requests.append(_engine_request(state, fields, token_ids, seeded, stop))
        if clamp is not None:
            clamps.append(clamp)
    headers = {}
    if ignored:
        headers["x-quire-ignored"] = header_list(ignored)
    if clamps:
        headers["x-quire-clamped"] = f"{tokens.param}={min(clamp.used for clamp in clamps)}"
    return Job(requests=tuple(requests), text=_text_options(state, fields), headers=headers)


def start(request: Request, state: ServerState, job: Job) -> Generation:
    """The generation of a job; it queues nothing before its first delta is asked for."""
    if state.settings.enable_log_requests:
        for asked in job.requests:
            log.info(
                "%d prompt tokens, n %d, max_tokens %d, %s",
                len(asked.prompt_token_ids),
                asked.n,
                asked.stop.max_new_tokens,
                asked.sampling,
                extra={"request_id": request.scope["state"]["request_id"]},
            )
    return Generation(job.requests, job.text, tokenizer=state.tokenizer, client=state.client, metrics=state.metrics)


def reply_head(request: Request, state: ServerState, fields: GenerationFields, prefix: str, kind: str) -> ReplyHead:
    return ReplyHead(
        id=prefix + (fields.request_id or request.scope["state"]["request_id"]),
        object=kind,
        created=int(time.time()),
        model=fields.model or state.model_names[0],
        system_fingerprint=fingerprint(state.client.plan),
    )


def reply_options(
    fields: GenerationFields, *, num_logprobs: int | None, num_prompt_logprobs: int | None, echo: bool = False
) -> ReplyOptions:
    stream = fields.stream_options
    return ReplyOptions(
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        echo=echo,
        token_ids=bool(fields.return_token_ids),
        names_are_ids=bool(fields.return_tokens_as_token_ids),
        usage_at_end=stream is not None and bool(stream.include_usage),
        usage_always=stream is not None and bool(stream.continuous_usage_stats),
    )


async def answer(
    request: Request, state: ServerState, generation: Generation, renderer: Renderer, *, job: Job, stream: bool
) -> Response:
    """The reply, whole or streamed. Raises QueueFull, EngineFailed, ClientGone."""
    if stream:
        return EventStream(
            _frames(generation, renderer),
            headers=job.headers,
            keep_alive_seconds=state.settings.sse_keep_alive_interval,
        )
    choices = await unless_client_gone(request, _collect(generation))
    return Response(renderer.body(choices), media_type="application/json", headers=job.headers)


async def _frames(generation: Generation, renderer: Renderer) -> AsyncGenerator[bytes]:
    """One item per wake-up: a frame for each choice with news. The last item carries the end mark too."""
    async with aclosing(generation.deltas()) as wakes:
        async for deltas in wakes:
            chunk = renderer.frames(deltas)
            if generation.finished:
                chunk += renderer.ending()
            if chunk:
                yield chunk


async def _collect(generation: Generation) -> list[ChoiceDelta]:
    """Every choice whole, in order of their index."""
    whole: dict[int, ChoiceDelta] = {}
    texts: dict[int, list[str]] = {}
    async with aclosing(generation.deltas()) as wakes:
        async for deltas in wakes:
            for delta in deltas:
                known = whole.setdefault(delta.index, delta)
                texts.setdefault(delta.index, []).append(delta.text)
                if known is not delta:
                    known.token_ids += delta.token_ids
                    known.logprobs += delta.logprobs
                    known.offsets += delta.offsets
                    known.finish_reason = delta.finish_reason
                    known.stop_reason = delta.stop_reason
    return [replace(whole[index], text="".join(texts[index])) for index in sorted(whole)]


def _engine_request(
    state: ServerState, fields: GenerationFields, token_ids: Sequence[int], sampling: SamplingParams, stop: StopParams
) -> GenerationRequest:
    by_priority = state.client.plan.scheduler.policy == "priority"
    return GenerationRequest(
        request_id=secrets.token_hex(12),
        prompt_token_ids=tuple(token_ids),
        sampling=sampling,
        stop=stop,
        n=fields.n or 1,
        arrival_time=time.monotonic(),
        priority=fields.priority or 0 if by_priority else 0,
        cache_salt=fields.cache_salt or "",
    )


def _text_options(state: ServerState, fields: GenerationFields) -> TextOptions:
    return TextOptions(
        stop=tuple(fields.stop or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        min_tokens=fields.min_tokens or 0,
        skip_special_tokens=fields.skip_special_tokens is not False,
        spaces_between_special_tokens=fields.spaces_between_special_tokens is not False,
        interval=state.settings.stream_interval if fields.wants_stream else 1,
    )


def responses(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The documentation of both forms of a reply."""
    schema = chunk.model_json_schema(mode="serialization")
    stream = {"schema": _inlined(schema, schema.get("$defs", {}))}
    headers = {
        name: {"schema": {"type": "string"}, "description": description}
        for name, description in (
            ("x-quire-ignored", "fields that were accepted without effect"),
            ("x-quire-clamped", "values that were lowered, and to what"),
        )
    }
    return {
        200: {
            "model": whole,
            "description": "the whole reply; with 'stream', events of which each holds one chunk, then [DONE]",
            "content": {"text/event-stream": stream},
            "headers": headers,
        }
    }


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its references replaced by what they name; there is no recursive one."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items() if key != "$defs"}
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    return schema
