"""GET /v1/models and /v1/models/{id}, for clients of OpenAI and Anthropic."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from quire_server.answering.capabilities import Capability, capabilities
from quire_server.errors import ModelNotFound, RouteNotFound
from quire_server.http.openapi import error_response
from quire_server.metrics.metric_catalog import ModelState
from quire_server.state import ServerState, not_found, state_of

router = APIRouter(prefix="/v1/models", tags=["models"])


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int  # seconds since the epoch
    owned_by: Literal["quire"] = "quire"
    root: str  # the first name of the same model; of an adapter its directory
    parent: str | None = None  # of an adapter the model that it adds to
    state: ModelState  # whether it is in memory; a request loads a model that is not
    max_model_len: int  # tokens of prompt and answer together, as vLLM's clients read it
    context_length: int  # the same, as those of OpenRouter and Ollama do
    capabilities: list[Capability]
    default_sampling_params: dict[str, float]  # of requests that bring none: the model's own
    # For Anthropic's clients:
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


@router.get("")
async def list_models(request: Request) -> ModelList:
    """List the models and adapters that requests may name, the default one first."""
    state = state_of(request)
    data = [_model(each, name) for each in state.every for name in each.listed_names]
    return ModelList(data=data, first_id=data[0].id, last_id=data[-1].id)


@router.get("/{model_id:path}", responses={ModelNotFound.status: error_response(ModelNotFound)})
async def retrieve_model(model_id: str, request: Request) -> Model:
    """Return one model or adapter."""
    bare = model_id.rstrip("/")
    if not bare:  # `/v1/models/`
        raise RouteNotFound("There is no such route.")
    name = bare if state_of(request).find(model_id) is None else model_id  # the name of a folder may end with a slash
    state = state_of(request).find(name)
    if state is None:
        raise not_found(state_of(request), model_id)
    return _model(state, name)


def _model(state: ServerState, name: str) -> Model:
    served = state.adapters.find(name)
    started = int(state.started if served is None else served.loaded)
    return Model(
        id=name,
        created=started,
        root=state.model_names[0] if served is None else served.adapter.path,
        state=state.residency,
        parent=None if served is None else served.parent or state.model_names[0],
        max_model_len=state.max_model_len,
        context_length=state.max_model_len,
        capabilities=capabilities(state),
        default_sampling_params=state.model_text.defaults.shown,
        display_name=name,
        created_at=datetime.fromtimestamp(started, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=state.max_model_len,
    )
