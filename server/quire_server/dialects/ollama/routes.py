"""Ollama's API: /api/chat, /api/generate, /api/embed, and what it tells of models. Nothing is pulled or deleted."""

from __future__ import annotations

import time
from typing import Annotated, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quire_engine.contract.errors import QuireError
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
    ModelFields,
    ShowRequest,
)
from quire_server.errors import NotReady
from quire_server.http.access import is_operator
from quire_server.http.body import json_body
from quire_server.http.json_text import Pieces, pieces_of_object
from quire_server.http.large_reply import PiecedReply
from quire_server.http.openapi import line_responses
from quire_server.showing.version import VERSION
from quire_server.state import ServerState, state_of

router = APIRouter(prefix="/api", tags=["ollama"])

Fields = TypeVar("Fields", bound=ModelFields)
API_VERSION = "0.13.0"  # of Ollama, whose routes and fields these are
LINES = "application/x-ndjson"


@router.post("/chat", response_model=None, responses=line_responses(ChatReply))
async def chat(body: Annotated[ChatRequest, json_body(ChatRequest)], request: Request) -> Response:
    """Answer a conversation; without messages, load the model or let it go."""
    state, name, body = _admitted(request, body)
    if not body.messages:
        reason = await _load(state, body)
        return JSONResponse(loaded(name, reason, is_chat=True), headers=notes(state, body.reported()))
    return await answer(request, body.neutral(name), OllamaChatRenderer, keep_alive=b"", media_type=LINES)


@router.post("/generate", response_model=None, responses=line_responses(GenerateReply))
async def generate(body: Annotated[GenerateRequest, json_body(GenerateRequest)], request: Request) -> Response:
    """Continue a prompt; without one, load the model or let it go."""
    state, name, body = _admitted(request, body)
    if not body.prompt and not body.suffix:
        reason = await _load(state, body)
        return JSONResponse(loaded(name, reason, is_chat=False), headers=notes(state, body.reported()))
    options = body.neutral(name, has_template=state.model_text.prompts is not None)
    return await answer(request, options, OllamaRenderer, keep_alive=b"", media_type=LINES)


@router.post("/embed", response_model=None, responses={200: {"model": EmbedReply}})
async def embed(body: Annotated[EmbedRequest, json_body(EmbedRequest)], request: Request) -> Response:
    """The vectors of texts, of length 1."""
    began = time.monotonic_ns()
    state, name, body = _admitted(request, body)
    if not body.input:
        return JSONResponse({"model": name, "embeddings": []}, headers=notes(state, body.reported()))
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
    state, name, body = _admitted(request, body)
    if not body.prompt:
        return JSONResponse({"embedding": []}, headers=notes(state, body.reported()))
    made = await embedding_lists(request, body.neutral(name))
    (vector,) = made.entries
    return PiecedReply((b'{"embedding":' + vector + b"}",), held=made.held, headers=made.headers)


@router.get("/tags")
async def tags(request: Request) -> ModelTags:
    """The served models."""
    return ModelTags(models=[listed(each, name) for each in state_of(request).every for name in each.listed_names])


@router.get("/ps")
async def processes(request: Request) -> RunningModels:
    """The models in memory: those that are served, of several those that are loaded."""
    loaded_ones = (each for each in state_of(request).every if each.residency in {"loaded", "restarting"})
    return RunningModels(models=[running(each, name) for each in loaded_ones for name in each.listed_names])


@router.post("/show")
async def show(body: Annotated[ShowRequest, json_body(ShowRequest)], request: Request) -> ShownModel:
    """A model's details, template, defaults and capabilities."""
    return shown(*_chosen(request, body.asked))


@router.get("/version")
async def api_version() -> ApiVersion:
    """Return the version of Ollama's API that is served, and that of the server."""
    return ApiVersion(version=API_VERSION, quire=VERSION)


def _chosen(request: Request, model: str) -> tuple[ServerState, str]:
    """The model's state, and its name in this server's words. Raises NotReady, ModelNotFound."""
    bare = model.removesuffix(LATEST)
    name = model if state_of(request).knows_model(model) or not bare else bare
    return admit(request, name), name


def _admitted(request: Request, body: Fields) -> tuple[ServerState, str, Fields]:
    """Choose the model as `_chosen` does, and apply `keep_alive`, which leaves the body. Raises BadRequest too.

    How long a model stays is the operator's to say: other clients can lengthen the time, and with API keys not even
    that.
    """
    state, name = _chosen(request, body.model)
    seconds = body.kept_seconds()
    if state.catalog is None or seconds is None:
        return state, name, body
    asks = is_operator(request.scope, state.credentials, state.settings)
    if not asks and state.settings.needs_key:
        return state, name, body
    state.catalog.models.keep(state.model_names[0], seconds, shortens=asks)
    return state, name, body.model_copy(update={"keep_alive": None})


async def _load(state: ServerState, body: ModelFields) -> str:
    """A request without a prompt loads the model, or lets it go; returns which. Raises NotReady."""
    if state.catalog is None:
        return "load"
    models, name = state.catalog.models, state.model_names[0]
    if models.engines[name].keep_seconds == 0 and body.keep_alive is None and "keep_alive" in body.model_fields_set:
        return "unload"
    try:
        await models.load(name)
    except QuireError as error:
        raise NotReady(f"Not loaded: {error}.", code="model_failed") from None
    return "load"
