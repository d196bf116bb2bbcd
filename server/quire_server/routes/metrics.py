"""GET /metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from quire_server.metrics.metrics import render_several
from quire_server.state import state_of

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=PlainTextResponse)
async def scrape(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    state = state_of(request)
    await state.settle()
    if state.catalog is None:
        text = state.metrics.render(state.engines.load_ratio())
    else:
        text = render_several((each.metrics, each.engines.load_ratio()) for each in state.every)
    return Response(text, media_type=state.metrics.content_type)
