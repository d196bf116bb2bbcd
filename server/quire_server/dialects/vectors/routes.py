"""POST /v1/embeddings, /v1/score, /v1/rerank and /classify."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire_server.answering.prepare import admit
from quire_server.answering.ranking import answer_classes, answer_rerank, answer_scores
from quire_server.answering.vectors import answer_embeddings
from quire_server.dialects.vectors.wire import (
    ClassificationResponse,
    ClassifyRequest,
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from quire_server.http.body import json_body

router = APIRouter(tags=["vectors"])

EmbeddingBody = Annotated[EmbeddingRequest, json_body(EmbeddingRequest)]
ScoreBody = Annotated[ScoreRequest, json_body(ScoreRequest)]
RerankBody = Annotated[RerankRequest, json_body(RerankRequest)]
ClassifyBody = Annotated[ClassifyRequest, json_body(ClassifyRequest)]


@router.post("/v1/embeddings", response_model=None, responses={200: {"model": EmbeddingResponse}})
async def create_embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Return the vectors of texts."""
    admit(request, body.model)
    return await answer_embeddings(request, body.options(), as_text=body.encoding_format == "base64")


@router.post("/v1/score", response_model=None, responses={200: {"model": ScoreResponse}})
@router.post("/score", response_model=None, responses={200: {"model": ScoreResponse}})
async def create_scores(body: ScoreBody, request: Request) -> Response:
    """Score pairs of texts by how well they fit."""
    admit(request, body.model)
    return await answer_scores(request, body.options())


@router.post("/rerank", response_model=None, responses={200: {"model": RerankResponse}})
@router.post("/v1/rerank", response_model=None, responses={200: {"model": RerankResponse}})
@router.post("/v2/rerank", response_model=None, responses={200: {"model": RerankResponse}})
async def create_ranks(body: RerankBody, request: Request) -> Response:
    """Sort documents by how well they fit a query."""
    admit(request, body.model)
    shows = body.return_documents
    if shows is None:  # Cohere's second version gives the indices alone
        shows = not request.url.path.endswith("/v2/rerank")
    return await answer_rerank(request, body.options(), top_n=body.top_n or None, shows_documents=shows)


@router.post("/classify", response_model=None, responses={200: {"model": ClassificationResponse}})
@router.post("/v1/classify", response_model=None, responses={200: {"model": ClassificationResponse}})
async def create_classes(body: ClassifyBody, request: Request) -> Response:
    """Return the probabilities of the classes of texts."""
    admit(request, body.model)
    return await answer_classes(request, body.options(), activates=body.use_activation is not False)
