"""The events of a streamed response, each by its type.

Promises: these models document events, they are rendered elsewhere. Must not know: how text is generated.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from quire_server.wire.chat import TokenLogprob
from quire_server.wire.reply import ReplyModel
from quire_server.wire.responses.reply import OutputItem, OutputText, ReasoningText, ResponseObject


class NumberedEvent(ReplyModel):
    sequence_number: int


class WholeResponse(NumberedEvent):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(NumberedEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class OfItem(NumberedEvent):
    output_index: int
    item_id: str


class PartEvent(OfItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Literal[0]
    part: OutputText | ReasoningText


class TextDelta(OfItem):
    type: Literal["response.output_text.delta"]
    content_index: Literal[0]
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(OfItem):
    type: Literal["response.output_text.done"]
    content_index: Literal[0]
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(OfItem):
    type: Literal["response.reasoning_text.delta"]
    content_index: Literal[0]
    delta: str


class ReasoningDone(OfItem):
    type: Literal["response.reasoning_text.done"]
    content_index: Literal[0]
    text: str


class ArgumentsDelta(OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(OfItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(NumberedEvent):
    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        Annotated[
            WholeResponse
            | ItemEvent
            | PartEvent
            | TextDelta
            | TextDone
            | ReasoningDelta
            | ReasoningDone
            | ArgumentsDelta
            | ArgumentsDone
            | ErrorEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """Any of them."""
