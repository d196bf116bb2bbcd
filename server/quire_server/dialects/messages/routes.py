"""Anthropic's Messages API: POST /v1/messages, and the count of a prompt's tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering.answer import answer, in_order
from quire_server.answering.prepare import admit, count_prompt_tokens
from quire_server.dialects.messages.rendering import PING, MessageRenderer
from quire_server.dialects.messages.reply import MessageEvent, MessageObject, TokenCount
from quire_server.dialects.messages.request import CountTokensRequest, MessageRequest
from quire_server.http.body import json_body
from quire_server.http.disconnect import unless_client_gone
from quire_server.http.envelopes import ANTHROPIC_PATH
from quire_server.http.openapi import generation_responses

router = APIRouter(prefix=ANTHROPIC_PATH, tags=["generation"])


@router.post(
    "",
    response_model=None,
    responses=generation_responses(MessageObject, MessageEvent, ending="message_stop, or an error"),
)
async def create_message(body: Annotated[MessageRequest, json_body(MessageRequest)], request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's API."""
    admit(request, body.model)
    return await answer(request, body.options(), MessageRenderer, gather=in_order, keep_alive=PING)


@router.post("/count_tokens")
async def count_tokens(
    body: Annotated[CountTokensRequest, json_body(CountTokensRequest)], request: Request
) -> TokenCount:
    """Count the tokens that the prompt of such a message would have; nothing is generated."""
    state = admit(request, body.model)
    return TokenCount(input_tokens=await unless_client_gone(request, count_prompt_tokens(state, body.options())))
