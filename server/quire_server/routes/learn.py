"""The data of the page /learn, and the operator's order that sets the engine's pace.

Looking on is for the operator, as the dashboard's data are. A pause holds everybody's requests: it takes
`--set learn=true` too.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, cast

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from quire_engine.contract.errors import QuireError, Unanswerable
from quire_server.errors import BadRequest, Forbidden, NotReady, QueueFull, RouteNotFound
from quire_server.http.body import json_body
from quire_server.http.openapi import error_response
from quire_server.http.sse import EventStream, error_frames
from quire_server.learning.exercises import described
from quire_server.learning.watch import MOST_VIEWERS, Watch
from quire_server.state import ServerState, state_of

RETRY_SECONDS = 2.0  # an engine restart takes about as long
_VIEWERS_RETRY_SECONDS = 10.0

router = APIRouter()
log = logging.getLogger("quire.admin")


class PaceOrder(BaseModel):
    """An operator's order that sets when the engine's next steps may begin."""

    model_config = ConfigDict(extra="forbid")

    mode: Annotated[Literal["run", "pause", "slow"], Field(description="slow: `seconds` between two steps")]
    seconds: Annotated[float, Field(ge=0.02, le=5.0, description="between two steps, when slow")] = 0.5
    steps: Annotated[int, Field(ge=0, le=64, description="to let through in a pause")] = 0


class PaceReply(BaseModel):
    """The pace that holds now."""

    mode: str
    seconds: float
    steps_left: int  # that a pause still lets through


class NumberAnswer(BaseModel):
    """An answer to an exercise."""

    model_config = ConfigDict(extra="forbid")

    answer: Annotated[float, Field(ge=0, le=1e9)]


class Graded(BaseModel):
    """Whether the exercise is done, and why or why not."""

    done: bool
    said: str


Order = Annotated[PaceOrder, json_body(PaceOrder)]
_REFUSED: dict[int | str, dict[str, Any]] = {
    NotReady.status: error_response(NotReady),
    Forbidden.status: error_response(Forbidden),
}


@router.post("/admin/pace", tags=["admin"], responses=_REFUSED)
async def set_pace(order: Order, request: Request) -> PaceReply:
    """Pause the engine, let it compute step by step, or slowly. All requests wait meanwhile; needs `--set learn=true`.

    It holds while a page /learn is open, or for five seconds after the last order.
    """
    state = state_of(request)
    if not state.settings.learn:
        raise Forbidden(
            "Pausing holds everybody's requests: this server allows it only if started with --set learn=true."
        )
    request.scope["state"]["arguments"] = order.model_dump(exclude_defaults=True)
    asked: dict[str, Any] = {"mode": order.mode}
    asked |= {"seconds": order.seconds} if order.mode == "slow" else {}
    asked |= {"steps": order.steps} if order.steps else {}
    try:
        return PaceReply.model_validate(await _watch(request).order(asked))
    except Unanswerable as error:
        raise BadRequest(f"Not done: {error}.") from None
    except QuireError as error:
        raise NotReady(f"Not done: {error}.", retry_after_seconds=RETRY_SECONDS) from None


@router.get("/learn/events", include_in_schema=False)
async def follow(request: Request) -> Response:
    """The steps and the pool as they are, as server-sent events, until a stopping server has no requests left."""
    watch = _watch(request)
    if watch.num_viewers >= MOST_VIEWERS:
        raise QueueFull(
            f"{MOST_VIEWERS} of these pages are open on this server, which is the limit.",
            retry_after_seconds=_VIEWERS_RETRY_SECONDS,
        )
    viewing = _Viewing(state_of(request), watch)
    return EventStream(
        viewing.messages(),
        lambda message: b"data: " + message + b"\n\n",
        progress=viewing,
        failure=error_frames,
        headers={"x-content-type-options": "nosniff"},
        keep_alive_seconds=0.0,
    )


@router.post("/learn/exercises/{name}", include_in_schema=False)
async def grade(name: str, answer: Annotated[NumberAnswer, json_body(NumberAnswer)], request: Request) -> Graded:
    """Grade an answer to an exercise that asks for a number, by what this server was seen to do."""
    watch = _watch(request)
    try:
        said = watch.progress.answer(name, answer.answer)
    except KeyError:
        raise RouteNotFound("No exercise of this name asks for a number.") from None
    watch.look()
    return Graded(done=name in watch.progress.done, said=said)


@router.delete("/learn/exercises", include_in_schema=False)
async def begin_again(request: Request) -> Response:
    """Begin all exercises again."""
    _watch(request).progress.begin_again()
    _watch(request).look()
    return Response(status_code=204)


class _Viewing:
    """An open page."""

    def __init__(self, state: ServerState, watch: Watch) -> None:
        self.finished = False
        self._state = state
        self._watch = watch

    async def messages(self) -> AsyncGenerator[bytes]:
        plan = self._state.whole_plan
        limits = plan.scheduler.limits
        about = {
            "model": self._state.model_names[0],
            "may_pause": self._state.settings.learn,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "block_size": limits.block_size,
            "num_blocks": plan.scheduler.num_blocks,
            "exercises": list(described()),
        }
        yield b'{"server":' + msgspec.json.encode(about) + b"}"
        following = self._watch.follow()
        try:
            async for message in following:
                # A stopping server is not held up by who looks on.
                self.finished = self._state.stopping
                yield message
                if self.finished:
                    return
        finally:
            await following.aclose()


def _watch(request: Request) -> Watch:
    return cast(Watch, request.app.state.watch)
