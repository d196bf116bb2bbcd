"""GET /usage: the requests and tokens of the caller's tenant, or key, by day and model, and its budgets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from quire_server.answering.caller import account_of, tenant_of
from quire_server.http.json_text import Pieces, pieces_of_object
from quire_server.http.large_reply import PiecedReply
from quire_server.metrics.usage import KEPT_DAYS, UsageRow
from quire_server.state import ServerState, state_of

router = APIRouter(tags=["usage"])


class UsageOfDay(BaseModel):
    """The counts of one tenant and model on one day."""

    day: str  # of UTC
    tenant: Annotated[str, Field(description="or the name of a key; empty on a server without keys")]
    model: str
    requests: Annotated[int, Field(description="accepted prompts")]
    prompt_tokens: int
    cached_tokens: Annotated[int, Field(description="part of the prompt tokens")]
    output_tokens: int


class UsageReply(BaseModel):
    """Counts by day, the latest day first."""

    since: Annotated[str, Field(description="when the counts began, ISO 8601")]
    survives_restart: Annotated[bool, Field(description="whether the tenants file names a `usage_file`")]
    days_kept: int
    usage: list[UsageOfDay]


class BudgetLeft(BaseModel):
    """A budget of tokens, and what is left of it."""

    period: Literal["day", "month"]
    limit: int
    used: int
    resets_at: str


class OwnUsage(UsageReply):
    """The caller's counts and budgets."""

    tenant: str
    budgets: list[BudgetLeft]


@router.get("/usage", response_model=OwnUsage)
async def own_usage(request: Request) -> Response:
    """The caller's own requests and tokens by day (UTC) and model, and its budgets."""
    state, name = state_of(request), account_of(request)
    await state.settle()
    budgets = [
        {
            "period": each.period,
            "limit": each.limit,
            "used": each.used,
            "resets_at": each.resets_at.isoformat(timespec="seconds"),
        }
        for each in state.client.budgets(tenant_of(request)[0])
    ]
    return usage_reply(state, {"tenant": name, "budgets": budgets}, tenant=name)


def usage_reply(
    state: ServerState, head: Mapping[str, object], *, tenant: str | None = None, day: date | None = None
) -> Response:
    """The counts of a tenant, or of all, and of a day, or of all, after the fields of `head`; a day at a time."""
    book = state.metrics.usage
    fields = {
        **head,
        "since": book.since,
        "survives_restart": book.survives_restart,
        "days_kept": KEPT_DAYS,
        "usage": Pieces(_listed(book.by_day(tenant, None if day is None else day.isoformat()))),
    }
    return PiecedReply(pieces_of_object(fields), headers={"Cache-Control": "no-store"})


def _listed(days: Iterator[list[UsageRow]]) -> Iterator[bytes]:
    start = b"["
    for rows in days:
        if rows:
            yield start + msgspec.json.encode(rows)[1:-1]
            start = b","
    yield b"[]" if start == b"[" else b"]"
