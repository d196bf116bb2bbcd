"""Probes for orchestrators, and the version.

They answer in milliseconds whatever the engine does, except the deep one; the others need no key and have no log line.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from quire_server.answering.deep_check import DeepCheck
from quire_server.errors import NotReady
from quire_server.http.openapi import error_response
from quire_server.showing.version import VERSION
from quire_server.state import choose, choose_by_query, state_of

router = APIRouter(tags=["health"])

RETRY_SECONDS = 2.0  # an engine restart takes about as long
_NOT_READY: dict[int | str, dict[str, Any]] = {NotReady.status: error_response(NotReady)}


class Health(BaseModel):
    status: str


class DeepHealth(Health):
    seconds: float  # the engine's time for one token, including the wait


class Load(BaseModel):
    server_load: int  # requests


class Version(BaseModel):
    version: str


@router.get("/health/live", responses=_NOT_READY)
async def live(request: Request) -> Health:
    """The process answers, and the engine makes progress or is being restarted. A failure means: restart the server."""
    reason = state_of(request).fatal_reason()
    if reason is not None:
        raise _not_ready("Beyond help", reason)
    return Health(status="live")


@router.post("/ping", responses=_NOT_READY)
@router.get("/ping", responses=_NOT_READY)
@router.get("/health/ready", responses=_NOT_READY)
@router.get("/health", responses=_NOT_READY)
async def ready(
    request: Request,
    model: Annotated[str | None, Query(max_length=4096, description="of several, this one: is it loaded")] = None,
) -> Health:
    """The server accepts requests. A failure means: send requests elsewhere for now; the code has the reason."""
    state = state_of(request) if model is None else choose(request, model)
    reason = state.server_unready_reason() if model is None else state.unready_reason()
    if reason is not None:
        raise _not_ready("Not ready", reason, close=state.draining)
    return Health(status="ready")


@router.get("/health/deep", responses=_NOT_READY, dependencies=[Depends(choose_by_query)])
async def deep(request: Request) -> DeepHealth:
    """Computes one token, at most once at a time. Needs a key where requests do."""
    check: DeepCheck = request.app.state.deep_check
    return DeepHealth(status="computes", seconds=round(await check.seconds(state_of(request).client), 4))


@router.get("/load")
async def load(request: Request) -> Load:
    """The requests that are queued or running, as balancers for vLLM ask for them."""
    return Load(server_load=state_of(request).in_flight)


@router.get("/version")
async def get_version() -> Version:
    """Return the server's version."""
    return Version(version=VERSION)


def _not_ready(what: str, reason: str, *, close: bool = False) -> NotReady:
    code = reason.replace(" ", "_")
    return NotReady(f"{what}: {reason}.", retry_after_seconds=RETRY_SECONDS, code=code, close=close)
