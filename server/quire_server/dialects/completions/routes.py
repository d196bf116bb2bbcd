"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering.answer import answer
from quire_server.answering.prepare import admit
from quire_server.dialects.completions.rendering import CompletionRenderer
from quire_server.dialects.completions.wire import CompletionChunk, CompletionRequest, CompletionResponse
from quire_server.http.body import json_body
from quire_server.http.openapi import generation_responses

router = APIRouter(tags=["generation"])

Body = Annotated[CompletionRequest, json_body(CompletionRequest)]


@router.post(
    "/v1/completions", response_model=None, responses=generation_responses(CompletionResponse, CompletionChunk)
)
async def create_completion(body: Body, request: Request) -> Response:
    """Continue one or several texts, whole or as a stream of events."""
    admit(request, body.model)
    return await answer(request, body.options(), CompletionRenderer)
