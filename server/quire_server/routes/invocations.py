"""POST /invocations: the route that SageMaker calls, for every dialect whose body can be told by its fields.

A body is answered as on the dialect's own route, by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Discriminator, RootModel, Tag

from quire_server.dialects.chat.routes import create_chat_completion
from quire_server.dialects.chat.wire import ChatCompletionRequest
from quire_server.dialects.completions.routes import create_completion
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.dialects.vectors.routes import create_embeddings, create_scores
from quire_server.dialects.vectors.wire import EmbeddingRequest, ScoreRequest
from quire_server.http.body import json_body

router = APIRouter(tags=["generation"])

# The field that a dialect's body cannot do without; the first that is there counts.
_FIELDS = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "text_1": "/v1/score",
    "queries": "/v1/score",
}


def _route(body: object) -> str | None:
    """The route for a body; None where no dialect has its fields."""
    fields = body if isinstance(body, Mapping) else {}
    return next((route for name, route in _FIELDS.items() if fields.get(name) is not None), None)


class Invocation(
    RootModel[
        Annotated[
            Annotated[ChatCompletionRequest, Tag("/v1/chat/completions")]
            | Annotated[CompletionRequest, Tag("/v1/completions")]
            | Annotated[EmbeddingRequest, Tag("/v1/embeddings")]
            | Annotated[ScoreRequest, Tag("/v1/score")],
            Discriminator(
                _route,
                custom_error_type="no_dialect",
                custom_error_message=f"expected a body of {', '.join(dict.fromkeys(_FIELDS.values()))}:"
                f" with one of the fields {', '.join(_FIELDS)}",
            ),
        ]
    ]
):
    """The body of one of these routes."""

    # A body may have the fields of several.
    model_config = ConfigDict(json_schema_extra=lambda schema: schema.update(anyOf=schema.pop("oneOf")))


@router.post("/invocations", response_model=None)
async def invoke(body: Annotated[Invocation, json_body(Invocation)], request: Request) -> Response:
    """The reply of the dialect whose body this is."""
    match body.root:
        case ChatCompletionRequest():
            return await create_chat_completion(body.root, request)
        case CompletionRequest():
            return await create_completion(body.root, request)
        case EmbeddingRequest():
            return await create_embeddings(body.root, request)
    return await create_scores(body.root, request)
