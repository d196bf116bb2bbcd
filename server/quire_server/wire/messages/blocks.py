"""The content blocks of a conversation: texts, thoughts, uses of tools and their results.

Promises: a block that validates is one that this server can tell a model of, in the role that may say it. Must not
know: chat templates, how blocks become messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from quire_server.errors import BadRequest
from quire_server.wire.common import WireModel
from quire_server.wire.extras import review_extras

MAX_MESSAGES = 4096
MAX_BLOCKS = 1024

_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
# Fields of blocks and tools that ask for what is done anyway: prefixes are cached, arguments streamed as they come.
_NATURAL = frozenset({"cache_control", "citations", "caller", "toolset_name", "eager_input_streaming"})

BlockId = Annotated[str, Field(min_length=1, max_length=256)]


def extras_of(model: WireModel) -> list[str]:
    """The names of a block's or a tool's fields that have no effect. Raises BadRequest for what is not supported."""
    return review_extras({name: value for name, value in (model.model_extra or {}).items() if name not in _NATURAL})


def _kind(value: object) -> str | None:
    """Which of the models a block is of. Raises BadRequest for images, documents and what Anthropic's tools make."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    if kind not in _KINDS:
        raise BadRequest(
            f"Content blocks of type '{kind[:64]}' are not supported; {', '.join(_KINDS)} are.",
            param="messages",
            code="unsupported_parameter",
        )
    return kind


class TextBlock(WireModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(WireModel):
    """What the model thought in an earlier turn; for templates that show it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="not checked: thoughts of any origin may be passed back")


class RedactedThinkingBlock(WireModel):
    """Thoughts that only Anthropic can read; reported, and not told to the model."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: BlockId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, object]


_BLOCK_ERROR = {
    "custom_error_type": "block_type",
    "custom_error_message": "expected a content block: an object with a 'type'",
}
TextBlocks = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("text")], Discriminator(_kind, **_BLOCK_ERROR)]],
    Field(fail_fast=True, max_length=MAX_BLOCKS),
]


class ToolResultBlock(WireModel):
    """What a tool gave; its use comes before it."""

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: str | TextBlocks | None = None
    is_error: bool | None = Field(None, description="true: the model is told 'Error: ' before the content")


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Blocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("text")]
            | Annotated[ThinkingBlock, Tag("thinking")]
            | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
            | Annotated[ToolUseBlock, Tag("tool_use")]
            | Annotated[ToolResultBlock, Tag("tool_result")],
            Discriminator(_kind, **_BLOCK_ERROR),
        ]
    ],
    Field(fail_fast=True, max_length=MAX_BLOCKS),
]


class Message(WireModel):
    """A turn, or a part of one: neighbours of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> Message:
        for block in self.blocks:
            if block.type not in _OF_ROLE[self.role]:
                raise ValueError(f"a message of the role '{self.role}' cannot have a block of the type '{block.type}'")
        return self

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)

    def without_effect(self) -> Iterator[str]:
        """Names of what the model is not told of."""
        yield from extras_of(self)
        for block in self.content if not isinstance(self.content, str) else ():
            if isinstance(block, RedactedThinkingBlock):
                yield block.type
            yield from (f"content.{name}" for name in extras_of(block))
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for part in block.content:
                    yield from (f"content.content.{name}" for name in extras_of(part))


def text_of(content: str | list[TextBlock] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
