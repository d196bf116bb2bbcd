"""POST /v1/chat/completions, and the count of a prompt's tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering.answer import answer
from quire_server.answering.prepare import admit, count_prompt_tokens
from quire_server.dialects.chat.rendering import ChatRenderer
from quire_server.dialects.chat.wire import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse
from quire_server.dialects.common import InputTokens
from quire_server.http.body import json_body
from quire_server.http.disconnect import unless_client_gone
from quire_server.http.openapi import generation_responses

router = APIRouter(tags=["generation"])

Body = Annotated[ChatCompletionRequest, json_body(ChatCompletionRequest)]


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses=generation_responses(ChatCompletionResponse, ChatCompletionChunk),
)
async def create_chat_completion(body: Body, request: Request) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    admit(request, body.model)
    return await answer(request, body.options(), ChatRenderer)


@router.post("/v1/chat/completions/input_tokens")
async def count_input_tokens(body: Body, request: Request) -> InputTokens:
    """Count the tokens that the prompt of such a completion would have; nothing is generated."""
    state = admit(request, body.model)
    count = await unless_client_gone(request, count_prompt_tokens(state, body.options()))
    return InputTokens(object="response.input_tokens", input_tokens=count)
