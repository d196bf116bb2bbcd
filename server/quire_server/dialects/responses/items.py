"""The input items of a response: messages, calls and their outputs, reasoning, references.

An item is text only, and its stored form validates again as the same item.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator

from quire_server.dialects.common import WireModel
from quire_server.errors import Unsupported

MAX_ITEMS = 4096
MAX_PARTS = 1024

# Types of items that OpenAI's own tools leave in histories: web_search_call, computer_call_output, mcp_list_tools, ...
_FOREIGN = re.compile(r"[a-z_]+_call(_output)?|mcp_[a-z_]+|compaction[a-z_]*")
_PART_KINDS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")

ItemId = Annotated[str, Field(max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


def _check_part_kind(value: object) -> object:
    if isinstance(value, str) and value not in _PART_KINDS:
        raise Unsupported(f"Content parts of type '{value[:64]}' are not supported; only text is.", param="input")
    return value


class Part(WireModel):
    """A piece of text of a message, an output or reasoning."""

    type: Annotated[
        Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"],
        BeforeValidator(_check_part_kind),
    ]
    text: str | None = Field(None, description="needed by all types but refusal")
    refusal: str | None = Field(None, description="needed by the type refusal")
    annotations: list[Any] | None = Field(None, description="of an earlier output; without effect")
    logprobs: list[Any] | None = Field(None, description="of an earlier output; without effect")

    @model_validator(mode="after")
    def _check_text(self) -> Part:
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise ValueError(f"a part of the type '{self.type}' needs a '{self._text_field}'")
        return self

    @property
    def content(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""

    @property
    def _text_field(self) -> str:
        return "refusal" if self.type == "refusal" else "text"


Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]


def text_of(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.content for part in content)


def _part(kind: str, text: str) -> dict[str, object]:
    part: dict[str, object] = {"type": kind, "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part


class MessageItem(WireModel):
    """A turn of any role. An assistant's turn comes in the form of the reply, or as plain text."""

    prefix: ClassVar[str] = "msg"  # of new ids

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="without effect")

    def stored(self, new_id: str) -> dict[str, object]:
        kind = "output_text" if self.role == "assistant" else "input_text"
        texts = [self.content] if isinstance(self.content, str) else [part.content for part in self.content]
        return {
            "type": "message",
            "id": self.id or new_id,
            "status": self.status or "completed",
            "role": self.role,
            "content": [_part(kind, text) for text in texts],
        }


class FunctionCallItem(WireModel):
    """A function call of an earlier response."""

    prefix: ClassVar[str] = "fc"  # of new ids

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    namespace: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None

    def stored(self, new_id: str) -> dict[str, object]:
        return {
            "type": "function_call",
            "id": self.id or new_id,
            "status": self.status or "completed",
            "call_id": self.call_id,
            "name": self.name,
            **({} if self.namespace is None else {"namespace": self.namespace}),
            "arguments": self.arguments,
        }


class CustomCallItem(WireModel):
    """A custom tool's call of an earlier response."""

    prefix: ClassVar[str] = "ctc"  # of new ids

    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    namespace: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    input: str
    id: ItemId | None = None
    status: ItemStatus | None = None

    def stored(self, new_id: str) -> dict[str, object]:
        return {
            "type": "custom_tool_call",
            "id": self.id or new_id,
            "status": self.status or "completed",
            "call_id": self.call_id,
            "name": self.name,
            **({} if self.namespace is None else {"namespace": self.namespace}),
            "input": self.input,
        }


class FunctionOutputItem(WireModel):
    """The output of a function; its call comes before it."""

    prefix: ClassVar[str] = "fco"  # of new ids

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    output: str | Parts
    id: ItemId | None = None
    status: ItemStatus | None = None

    def stored(self, new_id: str) -> dict[str, object]:
        return {
            "type": "function_call_output",
            "id": self.id or new_id,
            "status": self.status or "completed",
            "call_id": self.call_id,
            "output": text_of(self.output),
        }


class CustomOutputItem(FunctionOutputItem):
    """The output of a custom tool; its call comes before it."""

    prefix: ClassVar[str] = "ctco"  # of new ids

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]
    name: Annotated[str, Field(max_length=256)] | None = Field(None, description="without effect: the call has it")

    def stored(self, new_id: str) -> dict[str, object]:
        return {**super().stored(new_id), "type": self.type}


class ReasoningItem(WireModel):
    """The reasoning of an earlier response, for templates that show it."""

    prefix: ClassVar[str] = "rs"  # of new ids

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: str | None = Field(None, description="without effect: reasoning is plain text")
    status: ItemStatus | None = None

    @property
    def text(self) -> str:
        return text_of(self.content or self.summary or "")

    def stored(self, new_id: str) -> dict[str, object]:
        return {
            "type": "reasoning",
            "id": self.id or new_id,
            "status": self.status or "completed",
            "summary": [_part("summary_text", part.content) for part in self.summary or ()],
            "content": [_part("reasoning_text", part.content) for part in self.content or ()],
        }


class ForeignItem(WireModel):
    """An item of a history that began elsewhere: a step of tools that only OpenAI's servers run. It is passed over."""

    type: Annotated[str, Field(pattern=_FOREIGN.pattern, max_length=64)]


class ItemReference(WireModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: Annotated[str, Field(min_length=1, max_length=256)]


def _kind(value: object) -> str | None:
    """The type of an item, which selects its model. Raises BadRequest for types that are not known."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value else "item_reference" if "id" in value else None
    if not isinstance(kind, str):
        return None
    if kind not in _KINDS and _FOREIGN.fullmatch(kind):
        return "foreign"
    if kind not in _KINDS:
        raise Unsupported(f"Items of type '{kind[:64]}' are not supported; {', '.join(_KINDS)} are.", param="input")
    return kind


_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
)

ContentItem = MessageItem | FunctionCallItem | FunctionOutputItem | CustomCallItem | CustomOutputItem | ReasoningItem
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ForeignItem, Tag("foreign")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="expected an item: an object with a 'type' or a 'role'",
    ),
]
Items = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)]

_STORED: TypeAdapter[list[ContentItem]] = TypeAdapter(
    list[
        Annotated[
            Annotated[MessageItem, Tag("message")]
            | Annotated[FunctionCallItem, Tag("function_call")]
            | Annotated[FunctionOutputItem, Tag("function_call_output")]
            | Annotated[CustomCallItem, Tag("custom_tool_call")]
            | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
            | Annotated[ReasoningItem, Tag("reasoning")],
            Discriminator(_kind),
        ]
    ]
)


def stored_items(raw: bytes) -> list[ContentItem]:
    """Parse the stored JSON of input or output items."""
    return _STORED.validate_json(raw)
