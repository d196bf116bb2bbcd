"""Probes and the version: what an orchestrator asks.

Promises: answers in milliseconds whatever the engine does; needs no key and leaves no access-log line.
Must not know: why the engine is in trouble beyond a few words.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Request
from pydantic import BaseModel

from quire_server.errors import NotReady
from quire_server.http.openapi import error_response
from quire_server.state import state_of

router = APIRouter(tags=["health"])

RETRY_SECONDS = 2.0  # an engine restart takes about as long


class Health(BaseModel):
    status: str


class Version(BaseModel):
    version: str


@router.get("/health/live")
async def live() -> Health:
    """The process answers. A failure means: restart it."""
    return Health(status="live")


@router.get("/health/ready", responses={NotReady.status: error_response(NotReady)})
@router.get("/health", responses={NotReady.status: error_response(NotReady)})
async def ready(request: Request) -> Health:
    """New requests are taken. A failure means: send them elsewhere for now; the code says why."""
    state = state_of(request)
    reason = state.unready_reason()
    if reason is not None:
        raise NotReady(
            f"Not ready: {reason}.",
            retry_after_seconds=RETRY_SECONDS,
            code=reason.replace(" ", "_"),
            close=state.draining,
        )
    return Health(status="ready")


@router.get("/version")
async def get_version() -> Version:
    return Version(version=version("quire"))
