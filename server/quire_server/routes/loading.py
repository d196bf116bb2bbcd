"""The operator's orders to several models: load one, put it to sleep, unload it; and where each is."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from quire_engine.contract.errors import QuireError
from quire_server.errors import Conflict, ModelNotFound, NotReady
from quire_server.http.body import json_body
from quire_server.http.openapi import error_response
from quire_server.metrics.metric_catalog import ModelState
from quire_server.state import Catalog, ServerState, choose, state_of

RETRY_SECONDS = 5.0

router = APIRouter(prefix="/admin", tags=["admin"])

log = logging.getLogger("quire.admin")


class ModelOrder(BaseModel):
    """The model that an order is for."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=4096, description="a served name")]


class SleepOrder(ModelOrder):
    level: Annotated[
        int, Field(strict=True, ge=1, le=2, description="1: the weights stay in memory; 2: nothing does")
    ] = 1


class ModelStatus(BaseModel):
    """One of several models."""

    model: str
    state: ModelState
    pinned: bool
    priority: int
    idle_seconds: float | None  # after which its engine ends, a request's wish included; None: it stays
    in_flight: int  # accepted and unfinished requests, held ones included
    memory_bytes: int  # that it takes now
    loaded_bytes: int  # that it takes when it is loaded
    pid: int | None  # of its engine's process
    seconds_until_loaded: float  # a guess; 0: it is
    why: str  # it has failed; empty: it has not


class ModelStatusList(BaseModel):
    """All models of the server, where there are several."""

    models: list[ModelStatus]
    memory_bytes: int  # that all of them take now
    budget_bytes: int  # --model-memory


_ERRORS: dict[int | str, dict[str, Any]] = {
    each.status: error_response(each) for each in (ModelNotFound, Conflict, NotReady)
}


@router.get("/models")
async def list_models(request: Request) -> ModelStatusList:
    """The models, and what they do with the memory; none where the server has one model."""
    catalog = state_of(request).catalog
    if catalog is None:
        return ModelStatusList(models=[], memory_bytes=0, budget_bytes=0)
    rows = [_status(catalog, state) for state in catalog.states]
    taken = sum(row.memory_bytes for row in rows)
    return ModelStatusList(models=rows, memory_bytes=taken, budget_bytes=catalog.models.budget)


@router.post("/load", responses=_ERRORS)
async def load(order: Annotated[ModelOrder, json_body(ModelOrder)], request: Request) -> ModelStatus:
    """Load a model, and wait until it is; others make way as they do for a request."""
    catalog, state = _chosen(request, order)
    try:
        await catalog.models.load(state.model_names[0])
    except QuireError as error:
        raise NotReady(f"Not loaded: {error}.", retry_after_seconds=RETRY_SECONDS, code="model_failed") from None
    log.warning("the model %s was loaded by order", state.model_names[0])
    return _status(catalog, state)


@router.post("/sleep", responses=_ERRORS)
async def sleep(order: Annotated[SleepOrder, json_body(SleepOrder)], request: Request) -> ModelStatus:
    """End a model's engine. Its requests are held until it is loaded, or asked for again, and then go on."""
    return await _put_away(request, order, level=order.level)


@router.post("/unload", responses=_ERRORS)
async def unload(order: Annotated[ModelOrder, json_body(ModelOrder)], request: Request) -> ModelStatus:
    """End a model's engine like /sleep, and keep nothing of the model in memory."""
    return await _put_away(request, order, level=2)


async def _put_away(request: Request, order: ModelOrder, *, level: int) -> ModelStatus:
    catalog, state = _chosen(request, order)
    await catalog.models.put_away(state.model_names[0], level=level)
    log.warning("the model %s was put away by order; %d requests are held", order.model, state.client.in_flight)
    return _status(catalog, state)


def _chosen(request: Request, order: ModelOrder) -> tuple[Catalog, ServerState]:
    """Raises ModelNotFound, and Conflict where the server has one model."""
    request.scope["state"]["arguments"] = order.model_dump(exclude_defaults=True)
    state = choose(request, order.model)
    if state.catalog is None:
        raise Conflict("This server has one model, which is always loaded; see --models.", code="one_model")
    return state.catalog, state


def _status(catalog: Catalog, state: ServerState) -> ModelStatus:
    engine = catalog.models.engines[state.model_names[0]]
    limit = engine.idle_limit
    return ModelStatus(
        model=engine.name,
        state=engine.state,
        pinned=engine.residency.pinned,
        priority=engine.residency.priority,
        idle_seconds=None if limit == float("inf") else limit,
        in_flight=state.client.in_flight,
        memory_bytes=engine.memory_bytes,
        loaded_bytes=engine.weights_bytes + engine.engine_bytes,
        pid=engine.supervisor.pid,
        seconds_until_loaded=round(catalog.models.seconds_until_loaded(engine.name), 3),
        why=engine.why,
    )
