"""POST /infill as in llama-server: fill in the middle of a text, for editors."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering.answer import answer
from quire_server.answering.prepare import admit
from quire_server.dialects.infill.rendering import InfillRenderer
from quire_server.dialects.infill.wire import InfillPart, InfillRequest, InfillResponse
from quire_server.http.body import json_body
from quire_server.http.openapi import generation_responses

router = APIRouter(tags=["generation"])

Body = Annotated[InfillRequest, json_body(InfillRequest)]


@router.post("/infill", response_model=None, responses=generation_responses(InfillResponse, InfillPart))
async def infill(body: Body, request: Request) -> Response:
    """Write the text between a prefix and a suffix, as llama-server does."""
    admit(request, body.model)
    return await answer(request, body.options(), InfillRenderer)
