"""POST /v1/requests/{request_id}/cancel: a client ends a request of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel

from quire_server.answering.caller import is_own
from quire_server.errors import RequestCancelled
from quire_server.state import state_of

router = APIRouter(prefix="/v1/requests", tags=["requests"])

RequestId = Annotated[str, Path(max_length=256, description="the reply's id, or the request's x-request-id")]


class Cancellation(BaseModel):
    """Whether the order has ended anything."""

    id: str
    object: Literal["request.cancellation"] = "request.cancellation"
    cancelled: bool  # false: no unfinished request of the caller has this id, or not any more


@router.post("/{request_id}/cancel")
async def cancel_request(request_id: RequestId, request: Request) -> Cancellation:
    """End a request that waits or runs, with all of its prompts and choices; its own reply ends with an error.

    Only the caller's own: of its tenant, or else of its key. To order it again changes nothing.
    """
    cancelled = False
    for state in state_of(request).every:
        wanted = set(state.names.find(request_id))
        for each in state.client.live():
            if each.request_id in wanted and is_own(request, each):
                state.client.end(each.request_id, "the client has cancelled it", RequestCancelled.default_code)
                cancelled = True
    return Cancellation(id=request_id, cancelled=cancelled)
