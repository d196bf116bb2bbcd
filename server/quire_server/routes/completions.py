"""POST /v1/completions.

Promises: every check that a 400 can come from happens before anything is queued.
Must not know: how tokens are made, sockets.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering import prepare as answering
from quire_server.answering.rendering import CompletionRenderer
from quire_server.answering.sampling import COMPLETION_TOKENS
from quire_server.errors import BadRequest
from quire_server.http.body import json_body
from quire_server.state import ServerState, state_of
from quire_server.wire.completions import CompletionChunk, CompletionRequest, CompletionResponse

router = APIRouter(tags=["generation"])

Body = Annotated[CompletionRequest, json_body(CompletionRequest)]


@router.post("/v1/completions", response_model=None, responses=answering.responses(CompletionResponse, CompletionChunk))
async def create_completion(body: Body, request: Request) -> Response:
    state = state_of(request)
    ignored = answering.admit(state, body)
    tokens = answering.TokenLimit(
        param="max_tokens", asked=body.max_tokens, default=COMPLETION_TOKENS, prompt_param="prompt"
    )
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("'max_tokens' must be at least 1, unless 'echo' is true.", param="max_tokens")
    prompts, texts = await _encode_prompts(state, body, tokens)
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    job = answering.prepare(
        state,
        body,
        prompts,
        tokens=tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        ignored=ignored,
    )
    generation = answering.start(request, state, job)
    renderer = CompletionRenderer(
        answering.reply_head(request, state, body, "cmpl-", "text_completion"),
        answering.reply_options(
            body, num_logprobs=body.logprobs, num_prompt_logprobs=body.prompt_logprobs, echo=bool(body.echo)
        ),
        generation,
        prompt_texts=texts,
        text_options=job.text,
        tokenizer=state.tokenizer,
    )
    return await answering.answer(request, state, generation, renderer, job=job, stream=body.wants_stream)


async def _encode_prompts(
    state: ServerState, body: CompletionRequest, tokens: answering.TokenLimit
) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt and, for echo, its text. The text of a prompt that was cut is that of its rest."""
    limits = answering.limits_of(state)
    prompts, texts = [], []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            whole = await state.text.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            limits.check_ids(prompt, "prompt")
            whole = prompt
        token_ids = answering.cut_prompt(whole, body, state, tokens)
        prompts.append(token_ids)
        if not body.echo:
            continue
        if isinstance(prompt, str) and token_ids == whole:
            texts.append(prompt)
        else:
            texts.append(state.tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens is not False))
    return prompts, texts
