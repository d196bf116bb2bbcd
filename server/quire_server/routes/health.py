"""Probes and the version: what an orchestrator asks.

Answers in milliseconds whatever the engine does, but for the deep one; the others need no key and no log line.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from quire_server.answering.deep_check import DeepCheck
from quire_server.errors import NotReady
from quire_server.http.openapi import error_response
from quire_server.state import state_of

router = APIRouter(tags=["health"])

RETRY_SECONDS = 2.0  # an engine restart takes about as long
_NOT_READY: dict[int | str, dict[str, Any]] = {NotReady.status: error_response(NotReady)}


class Health(BaseModel):
    status: str


class DeepHealth(Health):
    seconds: float  # that the engine took for one token, waiting included


class Version(BaseModel):
    version: str


@router.get("/health/live", responses=_NOT_READY)
async def live(request: Request) -> Health:
    """The process answers, and the engine's steps go on or are seen to. A failure means: restart it."""
    reason = state_of(request).fatal_reason()
    if reason is not None:
        raise _not_ready("Beyond help", reason)
    return Health(status="live")


@router.get("/health/ready", responses=_NOT_READY)
@router.get("/health", responses=_NOT_READY)
async def ready(request: Request) -> Health:
    """New requests are taken. A failure means: send them elsewhere for now; the code says why."""
    state = state_of(request)
    reason = state.unready_reason()
    if reason is not None:
        raise _not_ready("Not ready", reason, close=state.draining)
    return Health(status="ready")


@router.get("/health/deep", responses=_NOT_READY)
async def deep(request: Request) -> DeepHealth:
    """A token is computed for this very question, at most one at a time. It needs a key where requests do."""
    check: DeepCheck = request.app.state.deep_check
    return DeepHealth(status="computes", seconds=round(await check.seconds(), 4))


@router.get("/version")
async def get_version() -> Version:
    return Version(version=version("quire"))


def _not_ready(what: str, reason: str, *, close: bool = False) -> NotReady:
    code = reason.replace(" ", "_")
    return NotReady(f"{what}: {reason}.", retry_after_seconds=RETRY_SECONDS, code=code, close=close)
