"""POST /v1/chat/completions.

Promises: every check that a 400 can come from happens before anything is queued.
Must not know: how tokens are made, how templates are rendered, sockets.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering import prepare as answering
from quire_server.answering.rendering import ChatRenderer
from quire_server.errors import BadRequest
from quire_server.http.body import json_body
from quire_server.state import ServerState, state_of
from quire_server.wire.chat import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse
from quire_server.wire.extras import review_extras

router = APIRouter(tags=["generation"])

Body = Annotated[ChatCompletionRequest, json_body(ChatCompletionRequest)]


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses=answering.responses(ChatCompletionResponse, ChatCompletionChunk),
)
async def create_chat_completion(body: Body, request: Request) -> Response:
    state = state_of(request)
    ignored = answering.admit(state, body)
    for message in body.messages:
        ignored += [f"messages.{name}" for name in review_extras(message.model_extra)]
    by_new_name = body.max_completion_tokens is not None
    tokens = answering.TokenLimit(
        param="max_completion_tokens" if by_new_name else "max_tokens",
        asked=body.max_completion_tokens if by_new_name else body.max_tokens,
        default=None,
        prompt_param="messages",
    )
    if tokens.asked == 0:
        raise BadRequest(f"'{tokens.param}' must be at least 1.", param=tokens.param)
    prompt = await _render_prompt(state, body, ignored)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    job = answering.prepare(
        state,
        body,
        [answering.cut_prompt(prompt, body, state, tokens)],
        tokens=tokens,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        ignored=list(dict.fromkeys(ignored)),
    )
    generation = answering.start(request, state, job)
    renderer = ChatRenderer(
        answering.reply_head(request, state, body, "chatcmpl-", "chat.completion"),
        answering.reply_options(body, num_logprobs=num_logprobs, num_prompt_logprobs=body.prompt_logprobs),
        generation,
        tokenizer=state.tokenizer,
    )
    return await answering.answer(request, state, generation, renderer, job=job, stream=body.wants_stream)


async def _render_prompt(state: ServerState, body: ChatCompletionRequest, ignored: list[str]) -> list[int]:
    """The conversation's token ids. `reasoning_effort` goes to templates that know it, else to `ignored`."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if state.prompts is not None and "reasoning_effort" in state.prompts.variables:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        else:
            ignored.append("reasoning_effort")
    continues = bool(body.continue_final_message)
    text = await state.text.render(
        [message.for_template() for message in body.messages],
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        kwargs=kwargs,
    )
    if text is None:
        raise BadRequest("This model has no chat template; use /v1/completions.", param="messages")
    return await state.text.encode(text, add_special_tokens=bool(body.add_special_tokens))
