"""The message as /v1/messages replies with it. These models document replies; they are rendered elsewhere.

Promises: `input_tokens` and the two numbers of the cache together are the prompt. Must not know: how text is generated.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire_server.wire.reply import ReplyModel

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
    input: dict[str, Any] = Field(description="empty where what the model wrote is no JSON object, or was cut off")


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class OutputTokensDetails(ReplyModel):
    thinking_tokens: int


class MessageUsage(ReplyModel):
    input_tokens: int = Field(description="of the prompt, without those read from the cache")
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = Field(
        None, description="of models that think before they answer"
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
