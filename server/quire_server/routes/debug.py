"""The engine's state and decisions for the operator: steps, requests, blocks.

A question changes nothing, and answers have no text of clients.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from quire_engine.contract.errors import QuireError, Unanswerable
from quire_engine.memory_plan import plan_text
from quire_server.errors import NotReady, NotRemembered
from quire_server.http.openapi import error_response
from quire_server.state import ServerState, choose_by_query, state_of

RETRY_SECONDS = 2.0  # an engine restart takes about as long
MOST_STEPS = 256

_NOT_READY: dict[int | str, dict[str, Any]] = {NotReady.status: error_response(NotReady)}
_NOT_KNOWN: dict[int | str, dict[str, Any]] = {**_NOT_READY, NotRemembered.status: error_response(NotRemembered)}

router = APIRouter(prefix="/debug", tags=["debug"], dependencies=[Depends(choose_by_query)])

ReplicaName = Annotated[
    str, Query(max_length=280, description="one of several replicas, by its number or address; else the first")
]
RequestId = Annotated[str, Path(max_length=256, description="x-request-id, a reply's id, or the engine's own")]
Number = Annotated[int, Query(ge=0, le=2**53)]


class DebugIndex(BaseModel):
    """The operator's views of the engine, and the plan that the engine was started by."""

    routes: dict[str, str]  # a sentence for each
    plan: dict[str, list[str]]  # lines by the models' names: device, memory, limits


@router.get("")
async def index(request: Request) -> DebugIndex:
    """Lists the views of the engine, with each model's plan: device, memory, limits."""
    root = request.scope.get("root_path", "")
    routes = {
        f"{root}{route.path}": " ".join((route.endpoint.__doc__ or "").split("\n\n")[0].split())
        for route in router.routes
        if isinstance(route, APIRoute)
    }
    plans = {state.model_names[0]: state.client.plan for state in state_of(request).every}
    return DebugIndex(routes=routes, plan={name: plan_text(plan).splitlines() for name, plan in plans.items()})


@router.get("/steps", response_class=Response, responses=_NOT_KNOWN)
async def list_steps(
    request: Request,
    after: Number = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_STEPS)] = 100,
    events: bool = False,
    replica: ReplicaName = "",
) -> Response:
    """The engine's steps after a given one: plan, decisions with reasons, duration. `events`: inputs for a replay."""
    return _json(await _ask(state_of(request), "steps", replica, after=after, limit=limit, events=events))


@router.get("/requests", response_class=Response, responses=_NOT_KNOWN)
async def list_requests(request: Request) -> Response:
    """The live requests, with their state and why they wait, and the last ended ones."""
    state = state_of(request)
    answer = msgspec.json.decode(await _ask(state, "requests"))
    return _json(msgspec.json.encode(_named(state, answer, "live", "ended")))


@router.get("/requests/{request_id}", response_class=Response, responses=_NOT_KNOWN)
async def explain_request(request_id: RequestId, request: Request) -> Response:
    """Why a request takes, or took, so long; a client's request with several prompts has several engine requests."""
    state = state_of(request)
    answer = msgspec.json.decode(await _ask(state, "request", ids=state.names.find(request_id)))
    for one in answer["requests"]:
        one["largest_gap"] = _largest_gap(state, one["request_id"])
        _named(state, one, "took_blocks")
        _name_prefix(state, one["prefix"])
        for taker in one["took_blocks"]:
            one["why"] = one["why"].replace(taker["request_id"], taker["client_id"] or taker["request_id"])
    return _json(msgspec.json.encode(_named(state, answer, "requests")))


@router.get("/kv", response_class=Response, responses=_NOT_KNOWN)
async def show_pool(request: Request, replica: ReplicaName = "", names: bool = False) -> Response:
    """The KV pool: used, shared, cached and free blocks, and the empty slots in used ones.

    `names`: also the blocks that can be matched, by the names that KV events have, for each group of layers.
    """
    return _json(await _ask(state_of(request), "kv", replica, **({"names": True} if names else {})))


@router.get("/kv/audit", response_class=Response, responses=_NOT_KNOWN)
async def audit_pool(request: Request, replica: ReplicaName = "") -> Response:
    """Check all invariants of the pool; returns the first violation. Takes a moment on a large pool."""
    return _json(await _ask(state_of(request), "audit", replica))


@router.get("/kv/{request_id}", response_class=Response, responses=_NOT_KNOWN)
async def show_table(
    request_id: RequestId, request: Request, pos: Annotated[int | None, Query(ge=0, le=2**53)] = None
) -> Response:
    """The blocks of a live request; with `pos` the block and the offset of one position."""
    state = state_of(request)
    return _json(await _ask(state, "table", ids=state.names.find(request_id), pos=pos))


async def _ask(state: ServerState, what: str, replica: str = "", **arguments: object) -> bytes:
    if replica and state.replicas is None:
        raise NotRemembered("There are no replicas: this server has one engine.")
    arguments |= {"replica": replica} if replica else {}
    try:
        return await state.engines.inspect(what, msgspec.json.encode(arguments).decode())
    except Unanswerable as error:
        raise NotRemembered(f"{str(error)[:1].upper()}{str(error)[1:]}.") from None
    except QuireError as error:
        raise NotReady(f"Not answered: {error}.", retry_after_seconds=RETRY_SECONDS) from None


def _largest_gap(state: ServerState, request_id: str) -> dict[str, float | None] | None:
    """The longest time between two tokens of the request, as this server got them; None if it has forgotten them."""
    row = state.metrics.load.board.find(request_id)
    return None if row is None else {"milliseconds": round(1000 * row.gap, 1), "began_at": row.gap_at}


def _name_prefix(state: ServerState, prefix: dict[str, Any] | None) -> None:
    """The request that a prompt has most in common with, by the name that its client knows."""
    if prefix is not None:
        name = prefix["request_id"]
        prefix["client_id"] = known = None if name is None else state.names.name(name)
        if known:
            prefix["why"] = prefix["why"].replace(name, known)


def _named(state: ServerState, answer: dict[str, Any], *lists: str) -> dict[str, Any]:
    """The answer with the names that clients know."""
    for each in lists:
        answer[each] = [
            {"request_id": one.pop("request_id"), "client_id": state.names.name(one_id), **one}
            for one in answer[each]
            for one_id in (one["request_id"],)
        ]
    return answer


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})
