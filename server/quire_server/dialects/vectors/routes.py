"""POST /v1/embeddings and /v1/score."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering.prepare import admit
from quire_server.answering.vectors import answer_embeddings, answer_scores
from quire_server.dialects.vectors.wire import EmbeddingRequest, EmbeddingResponse, ScoreRequest, ScoreResponse
from quire_server.http.body import json_body
from quire_server.state import state_of

router = APIRouter(tags=["vectors"])

EmbeddingBody = Annotated[EmbeddingRequest, json_body(EmbeddingRequest)]
ScoreBody = Annotated[ScoreRequest, json_body(ScoreRequest)]


@router.post("/v1/embeddings", response_model=None, responses={200: {"model": EmbeddingResponse}})
async def create_embeddings(body: EmbeddingBody, request: Request) -> Response:
    admit(state_of(request), body.model)
    return await answer_embeddings(request, body.options(), as_text=body.encoding_format == "base64")


@router.post("/v1/score", response_model=None, responses={200: {"model": ScoreResponse}})
@router.post("/score", response_model=None, responses={200: {"model": ScoreResponse}})
async def create_scores(body: ScoreBody, request: Request) -> Response:
    admit(state_of(request), body.model)
    return await answer_scores(request, body.options(), num_left=len(body.texts[0]))
