"""GET /v1/models and /v1/models/{id}.

Promises: the names that requests may use, in the order they were configured.
Must not know: what kind of model it is.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from quire_server.errors import ModelNotFound
from quire_server.http.openapi import error_response
from quire_server.state import ServerState, state_of

router = APIRouter(prefix="/v1/models", tags=["models"])


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int  # seconds since the epoch
    owned_by: Literal["quire"] = "quire"
    root: str  # the first name of the same model
    parent: str | None = None
    max_model_len: int  # tokens of prompt and answer together


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("")
async def list_models(request: Request) -> ModelList:
    state = state_of(request)
    return ModelList(data=[_model(state, name) for name in state.model_names])


@router.get("/{model_id:path}", responses={ModelNotFound.status: error_response(ModelNotFound)})
async def retrieve_model(model_id: str, request: Request) -> Model:
    state = state_of(request)
    if not state.knows_model(model_id):
        raise ModelNotFound(model_id)
    return _model(state, model_id)


def _model(state: ServerState, name: str) -> Model:
    return Model(id=name, created=int(state.started), root=state.model_names[0], max_model_len=state.max_model_len)
