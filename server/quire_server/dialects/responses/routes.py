"""The Responses API: POST /v1/responses, and the routes of stored responses.

A response can be read only with the key that made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from quire_server.answering.answer import answer, in_order
from quire_server.answering.caller import caller_of
from quire_server.answering.prepare import admit, count_prompt_tokens
from quire_server.dialects.common import InputTokens
from quire_server.dialects.responses.items import ContentItem, ItemReference, stored_items
from quire_server.dialects.responses.rendering import ResponseRenderer, item_id, new_stem, response_id
from quire_server.dialects.responses.reply import Deleted, InputItems, ResponseEvent, ResponseObject
from quire_server.dialects.responses.request import ResponseRequest
from quire_server.dialects.responses.store import ResponseStore, StoredItem, StoredResponse
from quire_server.errors import BadRequest, ResponseNotFound, Unsupported
from quire_server.http.body import json_body
from quire_server.http.disconnect import unless_client_gone
from quire_server.http.openapi import error_response, generation_responses
from quire_server.state import state_of

router = APIRouter(prefix="/v1/responses", tags=["generation"])

Body = Annotated[ResponseRequest, json_body(ResponseRequest)]
NOT_FOUND: dict[int | str, dict[str, Any]] = {ResponseNotFound.status: error_response(ResponseNotFound)}


@router.post(
    "",
    response_model=None,
    responses=generation_responses(ResponseObject, ResponseEvent, ending="the whole response, or its error"),
)
async def create_response(body: Body, request: Request) -> Response:
    """Answer in the form of OpenAI's Responses API, whole or as a stream of events."""
    admit(request, body.model)
    store, owner = _store(request), _owner(request)
    previous, items = _conversation(body, store, owner)
    stem = new_stem()
    weight = caller_of(request).tenant.weight
    new, keeps = items[len(items) - len(body.own_items) :], store.is_on and body.store is not False
    options = body.options(items)
    if body.store and not keeps:
        options = replace(options, ignored=(*options.ignored, "store"))

    def keep(raw: bytes, output: Sequence[Mapping[str, Any]]) -> None:
        if not keeps:
            return
        given = [item.stored(item_id(item.prefix, stem, number, of_input=True)) for number, item in enumerate(new)]
        response = StoredResponse(
            id=response_id(stem), raw=raw, input=_encoded(given), output=_encoded(output), previous=previous
        )
        store.put(owner, response, weight=weight)

    shown = body.shown(state_of(request).model_text.defaults.sampling) | {"store": keeps}
    renderer = partial(ResponseRenderer, stem=stem, shown=shown, tools=body.offered(), keep=keep)
    return await answer(request, options, renderer, gather=in_order)


@router.post("/input_tokens")
async def count_input_tokens(body: Body, request: Request) -> InputTokens:
    """Count the tokens that the prompt of such a response would have; nothing is generated."""
    state = admit(request, body.model)
    _, items = _conversation(body, _store(request), _owner(request))
    count = await unless_client_gone(request, count_prompt_tokens(state, body.options(items)))
    return InputTokens(object="response.input_tokens", input_tokens=count)


@router.get("/{response_id}", response_model=ResponseObject, responses=NOT_FOUND)
async def retrieve_response(response_id: str, request: Request, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise Unsupported("Only background responses can be streamed again, and this server has none.", param="stream")
    return Response(_known(request, response_id).raw, media_type="application/json")


@router.delete("/{response_id}", responses=NOT_FOUND)
async def delete_response(response_id: str, request: Request) -> Deleted:
    """Delete a stored response; those that continue it keep its items."""
    if not _store(request).delete(_owner(request), response_id):
        raise _not_found(response_id)
    return Deleted(id=response_id, object="response", deleted=True)


@router.post("/{response_id}/cancel", response_model=ResponseObject, responses=NOT_FOUND)
async def cancel_response(response_id: str, request: Request) -> Response:
    """Refuse, since no response is made in the background."""
    _known(request, response_id)
    raise BadRequest("Only background responses can be cancelled; close the connection to stop this one.")


@router.get("/{response_id}/input_items", responses=NOT_FOUND)
async def list_input_items(
    response_id: str,
    request: Request,
    after: Annotated[str | None, Query(max_length=256)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> InputItems:
    """The items of its own request, without those of earlier responses."""
    items = list(_known(request, response_id).input)
    if order == "desc":
        items.reverse()
    ids = [item.id for item in items]
    start = 0
    if after is not None:
        if after not in ids:
            raise BadRequest(f"'after' names no item of this response: '{after[:96]}'.", param="after")
        start = ids.index(after) + 1
    page = items[start : start + limit]
    return InputItems(
        object="list",
        data=[msgspec.json.decode(item.raw) for item in page],
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + limit < len(items),
    )


def _conversation(
    body: ResponseRequest, store: ResponseStore, owner: str
) -> tuple[StoredResponse | None, list[ContentItem]]:
    """The response that this one continues, and all items up to the end of the new ones."""
    previous = None
    if body.previous_response_id is not None:
        previous = store.get(owner, body.previous_response_id)
        if previous is None:
            raise ResponseNotFound(
                f"There is no stored response with the id '{body.previous_response_id[:96]}'.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
    items: list[ContentItem] = [] if previous is None else _decoded(previous.history())
    for item in body.own_items:
        items.append(_referenced(item, store, owner) if isinstance(item, ItemReference) else item)
    return previous, items


def _referenced(reference: ItemReference, store: ResponseStore, owner: str) -> ContentItem:
    item = store.item(owner, reference.id)
    if item is None:
        raise ResponseNotFound(
            f"There is no stored item with the id '{reference.id[:96]}'.", param="input", code="item_not_found"
        )
    return _decoded([item])[0]


def _encoded(items: Sequence[Mapping[str, Any]]) -> list[StoredItem]:
    return [StoredItem(id=item["id"], raw=msgspec.json.encode(item)) for item in items]


def _decoded(items: Sequence[StoredItem]) -> list[ContentItem]:
    return stored_items(b"[" + b",".join(item.raw for item in items) + b"]")


def _known(request: Request, response_id: str) -> StoredResponse:
    response = _store(request).get(_owner(request), response_id)
    if response is None:
        raise _not_found(response_id)
    return response


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(f"There is no stored response with the id '{response_id[:96]}'.")


def _store(request: Request) -> ResponseStore:
    return cast(ResponseStore, request.app.state.responses)


def _owner(request: Request) -> str:
    """The owner of stored responses: the key's digest; without keys all clients share one owner."""
    return str(request.scope["state"].get("key_digest", ""))
