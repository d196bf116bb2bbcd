"""The wire models of replies of /v1/messages: the message and the events of a streamed one.

They document replies; the renderer does not use them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from quire_server.dialects.common import ReplyModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(ReplyModel):
    type: Literal["text"]
    text: str


class ThinkingContent(ReplyModel):
    type: Literal["thinking"]
    thinking: str = Field(description="empty where thinking.display is omitted")
    signature: str = Field(description="a digest of the thoughts; not checked when they are passed back")


class ToolUseContent(ReplyModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="empty if the model's text is no JSON object, or was cut off")


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class OutputTokensDetails(ReplyModel):
    thinking_tokens: int


class MessageUsage(ReplyModel):
    input_tokens: int = Field(description="of the prompt, without those read from the cache")
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = Field(
        None, description="for models that think before they answer"
    )


class MessageObject(ReplyModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None = Field(
        description="null in message_start; model_context_window_exceeded where less than max_tokens had room"
    )
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ReplyModel):
    input_tokens: int


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
    """A keep-alive without content."""

    type: Literal["ping"]


class ErrorCause(ReplyModel):
    error_code: str


class StreamError(ReplyModel):
    type: str
    message: str
    details: ErrorCause


class Error(ReplyModel):
    """The stream ends with an error."""

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
