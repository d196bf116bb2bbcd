"""/v1/batches: files of requests that are answered beside live ones, in OpenAI's form; and what runs them here.

A batch can be seen only by the client that owns it. Its lines are requests to this server's own routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, cast

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp

from quire_server.answering.caller import tenant_of
from quire_server.batches.input import ENDPOINTS
from quire_server.batches.records import Batch, Owner, new_batch_id
from quire_server.batches.runner import Answer, BatchRunner, Server
from quire_server.batches.store import MAX_FILES, BatchStore
from quire_server.errors import BadRequest, BatchesOff, BatchNotFound, Conflict, FileNotFound
from quire_server.http.body import json_body
from quire_server.http.openapi import error_response
from quire_server.http.own_requests import Vouched, ask_own
from quire_server.state import ServerState, state_of

router = APIRouter(prefix="/v1/batches", tags=["batches"])

MAX_UNFINISHED = 100  # batches of one owner
LONGEST_WINDOW = 30 * 86_400  # seconds
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_RETRY_SECONDS = 1.0  # after an error of the server's own
NOT_FOUND: dict[int | str, dict[str, Any]] = {BatchNotFound.status: error_response(BatchNotFound)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchService:
    """The store of this server's batches, and what runs them."""

    store: BatchStore
    runner: BatchRunner
    max_file_bytes: int  # of one upload


def batch_service(state: ServerState, app: ASGIApp, *, max_line_bytes: int) -> BatchService | None:
    """The service of a server that was given a folder for it, else None. Raises ConfigError."""
    folder = state.settings.batch_dir
    if folder is None:
        return None

    async def send(owner: Owner, endpoint: str, body: bytes) -> Answer:
        return await _send(state, app, owner, endpoint, body)

    def num_seats() -> int:
        return sum(each.client.num_seats for each in state.every)

    limits = state.client.plan.scheduler.limits
    store = BatchStore(folder, max_bytes=state.limits.max_files_bytes)
    server = Server(
        send=send,
        num_seats=num_seats,
        least_seats=lambda: max(1, int(limits.class_share.batch * num_seats())),
        is_live=lambda: any(
            each.service_class == "interactive" for model in state.every for each in model.client.live()
        ),
        is_draining=lambda: state.draining,
        knows_model=state.knows_model,
        max_line_bytes=max_line_bytes,
        on_line=state.metrics.batches.line,
        on_backlog=state.metrics.batches.backlog,
    )
    return BatchService(
        store=store,
        runner=BatchRunner(store, server),
        max_file_bytes=state.limits.max_file_bytes,
    )


async def _send(state: ServerState, app: ASGIApp, owner: Owner, endpoint: str, body: bytes) -> Answer:
    """Ask the server's own route in the name of the batch's owner."""
    digest = owner.key_digest
    if digest and bytes.fromhex(digest) not in state.credentials.known.api:  # the tenant may have got another key
        digest = state.tenants.key_of(owner.tenant) or digest
    reply = await ask_own(app, state.settings.root_path + endpoint, body, Vouched(key_digest=digest))
    is_final = reply.headers.get("x-should-retry") == "false"
    is_failure = reply.status >= 500 and reply.status not in (503, 504)
    retry = None
    if reply.status in (429, 503) and (not is_final or reply.status == 429):  # a budget is full again some day
        retry = float(reply.headers.get("retry-after", _RETRY_SECONDS))
    elif is_failure and not is_final:
        retry = _RETRY_SECONDS
    return Answer(
        status=reply.status,
        body=reply.body,
        request_id=reply.headers.get("x-request-id", ""),
        retry_seconds=retry,
        is_failure=is_failure,
    )


class OutputExpiry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=LONGEST_WINDOW)]


class BatchRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Annotated[Literal[ENDPOINTS], Field(description="of every line")]  # type: ignore[valid-type]
    completion_window: Annotated[
        str, Field(pattern=r"^[1-9][0-9]{0,3}[mhd]$", description="24h, or minutes, hours and days up to 30d")
    ]
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(min_length=1, max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: OutputExpiry | None = None

    def window_seconds(self) -> int:
        """Raises BadRequest."""
        seconds = int(self.completion_window[:-1]) * _UNITS[self.completion_window[-1]]
        if seconds > LONGEST_WINDOW:
            raise BadRequest("'completion_window' may be 30d at most.", param="completion_window")
        return seconds


class BatchError(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class BatchTokens(BaseModel):
    """Tokens of all lines in the output files of a batch that has ended."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Listed(BaseModel):
    """An object of which there are lists."""

    id: str


class BatchObject(Listed):
    model_config = ConfigDict(extra="forbid")

    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchTokens | None
    metadata: dict[str, str] | None


Item = TypeVar("Item", bound=Listed)


class Page(BaseModel, Generic[Item]):
    """A part of a list, as OpenAI pages them."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, found: Sequence[Item], limit: int) -> Self:
        """The page of what was found when one more than `limit` was asked for."""
        data = list(found[:limit])
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return cls(object="list", data=data, first_id=ends[0], last_id=ends[1], has_more=len(found) > limit)


class BatchList(Page[BatchObject]):
    pass


@router.post("")
async def create_batch(body: Annotated[BatchRequest, json_body(BatchRequest)], request: Request) -> BatchObject:
    """Begin a batch over an uploaded file; its lines run when there is room for them beside live requests."""
    service, owner = service_of(request), owner_of(request)
    window, store = body.window_seconds(), service.store
    file = await store.run(store.file, owner.name, body.input_file_id)
    if file is None:
        raise FileNotFound(body.input_file_id, param="input_file_id")
    number, used = await store.run(store.usage, owner.name)
    if number >= MAX_FILES:
        raise too_many_files(number)
    if used >= store.max_bytes:
        raise BadRequest(
            f"Your files and results have {used} bytes, and there is no room for those of this batch; delete some.",
            code="file_quota_exceeded",
        )
    now = store.now()
    batch = Batch(
        id=new_batch_id(),
        owner=owner,
        endpoint=body.endpoint,
        input_file=file.id,
        window=body.completion_window,
        metadata=body.metadata,
        status="validating",
        created_at=now,
        expires_at=now + window,
        times={},
        output_seconds=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )

    def add() -> bool:
        return store.add_batch(batch, most_unfinished=MAX_UNFINISHED)

    if not await store.run(add):
        raise BadRequest(f"You have {MAX_UNFINISHED} unfinished batches, which is the limit.", code="too_many_batches")
    service.runner.wake()
    return BatchObject(**batch.shown())


@router.get("", responses=NOT_FOUND)
async def list_batches(
    request: Request,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """List the batches of this key."""
    service, owner = service_of(request), owner_of(request)
    last = None if after is None else await _known(service, owner, after)

    def read() -> list[Batch]:
        return service.store.batches(owner.name, after=last, limit=limit + 1)

    return BatchList.of([BatchObject(**each.shown()) for each in await service.store.run(read)], limit)


@router.get("/{batch_id}", responses=NOT_FOUND)
async def retrieve_batch(batch_id: str, request: Request) -> BatchObject:
    """Return the state of a batch."""
    return BatchObject(**(await _known(service_of(request), owner_of(request), batch_id)).shown())


@router.post("/{batch_id}/cancel", responses={**NOT_FOUND, Conflict.status: error_response(Conflict)})
async def cancel_batch(batch_id: str, request: Request) -> BatchObject:
    """No further line is run; the output file has those that were answered."""
    service, owner = service_of(request), owner_of(request)
    batch = await service.store.run(service.store.cancel, owner.name, batch_id)
    if batch is None:
        raise BatchNotFound(batch_id)
    if batch.status not in ("cancelling", "cancelled"):
        raise Conflict(f"The batch is {batch.status}, and is not cancelled any more.", code="batch_ended")
    service.runner.wake()
    return BatchObject(**batch.shown())


def too_many_files(number: int) -> BadRequest:
    return BadRequest(f"You have {number} files, which is the limit; delete some.", code="too_many_files")


async def _known(service: BatchService, owner: Owner, batch_id: str) -> Batch:
    batch = await service.store.run(service.store.batch, batch_id, owner.name)
    if batch is None:
        raise BatchNotFound(batch_id)
    return batch


def service_of(request: Request) -> BatchService:
    """The service of the server that received this request. Raises BatchesOff."""
    service = cast(BatchService | None, request.app.state.batches)
    if service is None:
        raise BatchesOff
    return service


def owner_of(request: Request) -> Owner:
    """A listed tenant, else a key; on a server without keys all clients are one owner."""
    tenant, digest = tenant_of(request)
    is_listed = state_of(request).tenants.key_of(tenant.name) is not None
    name = f"tenant {tenant.name}" if is_listed else f"key {digest}" if digest else ""
    return Owner(name=name, tenant=tenant.name if is_listed else "", key_digest=digest)
