"""The events of a streamed message. These models document them; they are rendered elsewhere.

Promises: every event that a stream can have is one of these. Must not know: how text is generated.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, RootModel

from quire_server.wire.messages.reply import Content, MessageObject, MessageUsage, StopReason
from quire_server.wire.reply import ReplyModel


class MessageStart(ReplyModel):
    type: Literal["message_start"]
    message: MessageObject


class BlockStart(ReplyModel):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextDelta(ReplyModel):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ReplyModel):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(ReplyModel):
    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(ReplyModel):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(ReplyModel):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")]


class BlockStop(ReplyModel):
    type: Literal["content_block_stop"]
    index: int


class Stopped(ReplyModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ReplyModel):
    type: Literal["message_delta"]
    delta: Stopped
    usage: MessageUsage = Field(description="of the whole message")


class MessageStop(ReplyModel):
    type: Literal["message_stop"]


class Ping(ReplyModel):
    """Nothing is new; the connection lives."""

    type: Literal["ping"]


class ErrorCause(ReplyModel):
    error_code: str


class StreamError(ReplyModel):
    type: str
    message: str
    details: ErrorCause


class Error(ReplyModel):
    """The stream cannot go on, and ends."""

    type: Literal["error"]
    error: StreamError
    request_id: str


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | Error,
            Field(discriminator="type"),
        ]
    ]
):
    pass
