"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, for the operator."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from quire_server.errors import BadRequest, ModelNotFound, NotReady
from quire_server.http.body import json_body
from quire_server.http.openapi import error_response
from quire_server.state import choose, state_of

router = APIRouter(prefix="/v1", tags=["admin"])

log = logging.getLogger("quire.admin")

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/:-]{1,96}$", description="the name for `model` in requests")]


class LoadOrder(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096, description="its directory on the server")]
    base_model_name: Annotated[
        str | None,
        Field(max_length=256, description="the parent in lists of models; of several, the one to load it for"),
    ] = None
    load_inplace: Annotated[bool, Field(description="replace the adapter of this name")] = False


class UnloadOrder(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: _Name
    lora_int_id: Annotated[int | None, Field(description="without effect: names are unique")] = None


_LOAD: dict[int | str, dict[str, Any]] = {
    BadRequest.status: error_response(BadRequest),
    ModelNotFound.status: error_response(ModelNotFound),
    NotReady.status: error_response(NotReady),
}


@router.post("/load_lora_adapter", response_class=PlainTextResponse, responses=_LOAD)
async def load_lora_adapter(order: Annotated[LoadOrder, json_body(LoadOrder)], request: Request) -> PlainTextResponse:
    """Load an adapter; streams go on. With `load_inplace` requests that run keep the adapter that they began with."""
    request.scope["state"]["arguments"] = order.model_dump(exclude_defaults=True)
    state = state_of(request)
    if state.catalog is not None:
        state = choose(request, order.base_model_name)
    served = await state.adapters.load(
        order.lora_name, order.lora_path, in_place=order.load_inplace, parent=order.base_model_name or ""
    )
    await state.settle()
    log.warning("the adapter %s was loaded: sha256:%s, rank %d", order.lora_name, served.adapter.digest, served.rank)
    return PlainTextResponse(f"Success: LoRA adapter '{order.lora_name}' added successfully.")


@router.post(
    "/unload_lora_adapter",
    response_class=PlainTextResponse,
    responses={ModelNotFound.status: error_response(ModelNotFound)},
)
async def unload_lora_adapter(
    order: Annotated[UnloadOrder, json_body(UnloadOrder)], request: Request
) -> PlainTextResponse:
    """Forget an adapter's name; the requests that have it finish."""
    request.scope["state"]["arguments"] = order.model_dump(exclude_defaults=True)
    state = choose(request, order.lora_name)
    await state.adapters.unload(order.lora_name)
    await state.settle()
    log.warning("the adapter %s was unloaded", order.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{order.lora_name}' removed successfully.")
