"""Ollama's API: /api/chat, /api/generate, /api/embed, and what it tells of models. Nothing is pulled or deleted."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quire_server.answering.answer import answer
from quire_server.answering.prepare import admit, notes
from quire_server.answering.vectors import embedding_lists
from quire_server.dialects.ollama.facts import listed, running, shown
from quire_server.dialects.ollama.rendering import OllamaChatRenderer, OllamaRenderer, loaded
from quire_server.dialects.ollama.reply import (
    ApiVersion,
    ChatReply,
    EmbeddingsReply,
    EmbedReply,
    GenerateReply,
    ModelTags,
    RunningModels,
    ShownModel,
)
from quire_server.dialects.ollama.request import (
    LATEST,
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    ShowRequest,
)
from quire_server.http.body import json_body
from quire_server.http.json_text import Pieces, pieces_of_object
from quire_server.http.large_reply import PiecedReply
from quire_server.http.openapi import line_responses
from quire_server.state import ServerState, state_of

router = APIRouter(prefix="/api", tags=["ollama"])

API_VERSION = "0.13.0"  # of Ollama, whose routes and fields these are
LINES = "application/x-ndjson"


@router.post("/chat", response_model=None, responses=line_responses(ChatReply))
async def chat(body: Annotated[ChatRequest, json_body(ChatRequest)], request: Request) -> Response:
    state = state_of(request)
    name = _admitted(state, body.model)
    if not body.messages:
        return JSONResponse(loaded(name, is_chat=True), headers=notes(state, body.reported()))
    return await answer(request, body.neutral(name), OllamaChatRenderer, keep_alive=b"", media_type=LINES)


@router.post("/generate", response_model=None, responses=line_responses(GenerateReply))
async def generate(body: Annotated[GenerateRequest, json_body(GenerateRequest)], request: Request) -> Response:
    state = state_of(request)
    name = _admitted(state, body.model)
    if not body.prompt and not body.suffix:
        return JSONResponse(loaded(name, is_chat=False), headers=notes(state, body.reported()))
    options = body.neutral(name, has_template=state.prompts is not None)
    return await answer(request, options, OllamaRenderer, keep_alive=b"", media_type=LINES)


@router.post("/embed", response_model=None, responses={200: {"model": EmbedReply}})
async def embed(body: Annotated[EmbedRequest, json_body(EmbedRequest)], request: Request) -> Response:
    """The vectors of texts, of length 1."""
    began = time.monotonic_ns()
    name = _admitted(state_of(request), body.model)
    made = await embedding_lists(request, body.neutral(name))
    fields = {
        "model": name,
        "embeddings": Pieces(made.pieces()),
        "total_duration": time.monotonic_ns() - began,
        "load_duration": 0,
        "prompt_eval_count": made.usage.prompt_tokens,
    }
    return PiecedReply(pieces_of_object(fields), held=made.held, headers=made.headers)


@router.post("/embeddings", response_model=None, responses={200: {"model": EmbeddingsReply}})
async def embeddings(body: Annotated[EmbeddingsRequest, json_body(EmbeddingsRequest)], request: Request) -> Response:
    """The older form of /api/embed: one text, one vector."""
    made = await embedding_lists(request, body.neutral(_admitted(state_of(request), body.model)))
    (vector,) = made.entries
    return PiecedReply((b'{"embedding":' + vector + b"}",), held=made.held, headers=made.headers)


@router.get("/tags")
async def tags(request: Request) -> ModelTags:
    """The served models."""
    state = state_of(request)
    return ModelTags(models=[listed(state, name) for name in _names(state)])


@router.get("/ps")
async def processes(request: Request) -> RunningModels:
    """The models in memory: those that are served."""
    state = state_of(request)
    return RunningModels(models=[running(state, name) for name in _names(state)])


@router.post("/show")
async def show(body: Annotated[ShowRequest, json_body(ShowRequest)], request: Request) -> ShownModel:
    """A model's details, template, defaults and capabilities."""
    state = state_of(request)
    return shown(state, _admitted(state, body.asked))


@router.get("/version")
async def api_version() -> ApiVersion:
    return ApiVersion(version=API_VERSION, quire=version("quire"))


def _names(state: ServerState) -> tuple[str, ...]:
    return (*state.model_names, *state.adapters)


def _admitted(state: ServerState, model: str) -> str:
    """The name of the model in this server's words. Raises NotReady, ModelNotFound."""
    bare = model.removesuffix(LATEST)
    name = model if state.knows_model(model) or not bare else bare
    admit(state, name)
    return name
