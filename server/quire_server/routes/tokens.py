"""POST /tokenize and /detokenize, GET /tokenizer_info: the token ids of a prompt, without generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Self

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from quire_server.answering.prepare import notes
from quire_server.dialects.common import FEW_PARTS
from quire_server.dialects.tools import MAX_TOOLS
from quire_server.errors import BadRequest
from quire_server.http.body import LongList, json_body
from quire_server.http.disconnect import unless_client_gone
from quire_server.http.json_text import (
    IDS_AT_ONCE,
    Pieces,
    pieces_of_ids,
    pieces_of_list,
    pieces_of_object,
    pieces_of_text,
)
from quire_server.http.large_reply import PiecedReply
from quire_server.state import ServerState, choose, choose_by_query, state_of

router = APIRouter(tags=["tokens"])

MAX_MESSAGES = 4096
_STRINGS_AT_ONCE = 4096
_ID_BYTES = 8  # JSON bytes per token of a reply, estimated
_STRING_BYTES = 24


class TokenizeRequest(BaseModel):
    """A text in `prompt`, or a conversation in `messages`."""

    model_config = ConfigDict(extra="allow")  # unknown fields are reported

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1, max_length=MAX_MESSAGES), FEW_PARTS] | None = (
        None
    )
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = Field(None, description="the name of one of the model's chat templates")
    chat_template_kwargs: dict[str, JsonValue] = {}
    tools: Annotated[list[dict[str, JsonValue]], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("'add_generation_prompt' and 'continue_final_message' cannot both be true")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(None, description="as the vocabulary spells them")


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: LongList[int]


class DetokenizeResponse(BaseModel):
    prompt: str


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: Annotated[TokenizeRequest, json_body(TokenizeRequest)], request: Request) -> Response:
    """Return the token ids of a prompt or of a conversation in the model's template."""
    state = choose(request, body.model)
    template = None
    if state.model_text.prompts is not None:
        template = state.model_text.prompts.chosen(has_tools=bool(body.tools), name=body.chat_template)
    headers = notes(state, _unknown(body), body.messages or (), body.chat_template_kwargs, template)
    ids = await unless_client_gone(request, _ids(state, body))
    fields = {
        "count": len(ids),
        "max_model_len": state.max_model_len,
        "tokens": Pieces(pieces_of_ids(ids)),
        "token_strs": Pieces(pieces_of_list(ids, _STRINGS_AT_ONCE, lambda some, _: _strings(state, some)))
        if body.return_token_strs
        else None,
    }
    held = state.replies.hold()
    held.grow(len(ids) * (_STRING_BYTES if body.return_token_strs else _ID_BYTES))
    return PiecedReply(pieces_of_object(fields), held=held, headers=headers)


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: Annotated[DetokenizeRequest, json_body(DetokenizeRequest)], request: Request) -> Response:
    """Return the text of token ids."""
    state = choose(request, body.model)
    headers = notes(state, _unknown(body))
    text = await unless_client_gone(request, _text_of(state, body.tokens))
    held = state.replies.hold()
    held.grow(len(text))
    return PiecedReply(pieces_of_object({"prompt": Pieces(pieces_of_text(text))}), held=held, headers=headers)


@router.get("/tokenizer_info", dependencies=[Depends(choose_by_query)])
async def tokenizer_info(request: Request) -> dict[str, object]:
    """Special tokens and chat template, for clients that render prompts themselves."""
    return state_of(request).model_text.tokenizer.info()


def _unknown(body: BaseModel) -> list[str]:
    return [name for name, value in (body.model_extra or {}).items() if value is not None]


async def _ids(state: ServerState, body: TokenizeRequest) -> Sequence[int]:
    text = await _text(state, body)
    add_special_tokens = body.add_special_tokens
    if add_special_tokens is None:
        add_special_tokens = body.messages is None
    return await state.text.encode(text, add_special_tokens=add_special_tokens)


async def _text_of(state: ServerState, ids: Sequence[int]) -> str:
    size = state.model_text.tokenizer.vocab_size
    for at in range(0, len(ids), IDS_AT_ONCE):
        some = ids[at : at + IDS_AT_ONCE]
        if not 0 <= min(some) <= max(some) < size:
            index = next(index for index, token in enumerate(some, start=at) if not 0 <= token < size)
            raise BadRequest(f"Token ids are 0 to {size - 1}.", param=f"tokens[{index}]")
        await asyncio.sleep(0)
    return await state.text.decode(ids)


def _strings(state: ServerState, ids: Sequence[int]) -> list[str]:
    return list(map(state.model_text.tokenizer.vocabulary_string, ids))


async def _text(state: ServerState, body: TokenizeRequest) -> str:
    if body.prompt is not None:
        return body.prompt
    text = await state.text.render(
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=body.chat_template_kwargs,
        tools=body.tools or (),
        template=body.chat_template,
    )
    if text is None:
        raise BadRequest("This model has no chat template; use 'prompt'.", param="messages")
    return text
