"""Pages for people: `/`, the API reference at `/docs`, the dashboard, `/learn`, and their scripts and styles.

Nothing is loaded from other hosts. The pages have no secrets and need no key; their calls to this server do.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from quire_server.errors import RouteNotFound
from quire_server.http.body import json_body
from quire_server.showing.version import VERSION
from quire_server.text.markdown import MarkdownRenderer

router = APIRouter(include_in_schema=False)

METHODS = ["GET", "HEAD"]
# The pages' own scripts and styles, calls to this server, and nothing else; no other site may frame them.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",  # the files change with the server's version
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FILES = {
    file.name: file.read_bytes()
    for file in (files("quire_server.http") / "pages").iterdir()
    if file.name.rpartition(".")[2] in _TYPES
}


class Texts(BaseModel):
    """Texts in markdown, as models write them."""

    model_config = ConfigDict(extra="forbid")

    texts: list[str]


def _page(name: str) -> Response:
    media_type = _TYPES[name.rpartition(".")[2]]
    return Response(_FILES[name], media_type=media_type, headers=_HEADERS)


@router.api_route("/", methods=METHODS)
async def landing(request: Request) -> Response:
    """The page; a client that prefers JSON to HTML gets the links."""
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and "text/html" not in accepted:
        where = {"docs": "/docs", "openapi": "/openapi.json", "models": "/v1/models", "health": "/health"}
        return JSONResponse({"name": "quire", "version": VERSION, **where}, headers={"vary": "accept"})
    page = _page("index.html")
    page.headers["vary"] = "accept"
    return page


@router.api_route("/docs", methods=METHODS)
async def reference() -> Response:
    return _page("docs.html")


@router.api_route("/favicon.ico", methods=METHODS)
async def icon() -> Response:
    """The icon, where browsers look for it without being told."""
    return _page("icon.svg")


@router.api_route("/dashboard", methods=METHODS)
async def dashboard() -> Response:
    """The live dashboard; the page reads its data from /dashboard/events."""
    return _page("dashboard.html")


@router.api_route("/learn", methods=METHODS)
async def learn() -> Response:
    """The pool and the steps as they happen; the page reads them from /learn/events."""
    return _page("learn.html")


@router.api_route("/pages/{name}", methods=METHODS)
async def part(name: str) -> Response:
    """A script, the style or the icon of the pages."""
    if name not in _FILES or name.endswith(".html"):
        raise RouteNotFound("There is no such route.")
    return _page(name)


@router.post("/pages/render")
async def render(body: Annotated[Texts, json_body(Texts)], request: Request) -> Response:
    """Make HTML of markdown for the chat: of whole answers, and of the part of one that is still growing."""
    renderer: MarkdownRenderer = request.app.state.markdown
    found = msgspec.json.encode({"html": await renderer.render(body.texts)})
    return Response(found, media_type="application/json", headers={"cache-control": "no-store"})
