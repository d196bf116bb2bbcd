"""POST /v1/completions.

Promises: every check that a 400 can come from happens before anything is queued.
Must not know: how tokens are made, sockets.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering.answer import answer
from quire_server.answering.completion_rendering import CompletionRenderer
from quire_server.answering.prepare import admit
from quire_server.http.body import json_body
from quire_server.http.openapi import generation_responses
from quire_server.state import state_of
from quire_server.wire.completions import CompletionChunk, CompletionRequest, CompletionResponse

router = APIRouter(tags=["generation"])

Body = Annotated[CompletionRequest, json_body(CompletionRequest)]


@router.post(
    "/v1/completions", response_model=None, responses=generation_responses(CompletionResponse, CompletionChunk)
)
async def create_completion(body: Body, request: Request) -> Response:
    admit(state_of(request), body.model)
    return await answer(request, body.options(), CompletionRenderer)
