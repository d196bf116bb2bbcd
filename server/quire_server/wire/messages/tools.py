"""The tools of a message's request, and which of them may or must be used.

Promises: what validates are tools that the client runs, with names of their own, and a choice among them. Must not
know: how uses are written or read, templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from quire_server.answering.options import Tool, ToolOptions
from quire_server.errors import BadRequest
from quire_server.wire.common import WireModel
from quire_server.wire.tools import tool_options

MAX_TOOLS = 512  # agents with a few tool servers offer more than the 128 that OpenAI allows

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


def _check_kind(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise BadRequest(
            f"Tools of type '{kind[:64]}' are not supported; only those that the client describes and runs are.",
            param="tools",
            code="unsupported_parameter",
        )
    return value


class ToolDefinition(WireModel):
    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    input_schema: dict[str, Any] = Field(description="the JSON schema of its input")
    strict: bool | None = Field(None, description="the input follows the schema whatever the model would write")

    def neutral(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.input_schema,
            strict=bool(self.strict),
        )

    def for_template(self) -> dict[str, object]:
        function: dict[str, object] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        return {"type": "function", "function": function}


Tools = Annotated[
    list[Annotated[ToolDefinition, BeforeValidator(_check_kind)]], Field(fail_fast=True, max_length=MAX_TOOLS)
]


class ToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="with the type tool: the one that must be used")
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one use in a reply")

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("a choice of the type 'tool' needs a 'name'")
        return self


def offered(
    tools: Sequence[ToolDefinition], choice: ToolChoice | None
) -> tuple[Sequence[ToolDefinition], ToolOptions | None]:
    """The tools that the model is told of, and which it may or must use. Raises BadRequest for a choice that is none.

    With the type "none" it is told of none. The type "auto" needs no tools: clients send it always.
    """
    kind = "auto" if choice is None else choice.type
    parallel = choice is None or not choice.disable_parallel_tool_use
    word: Literal["none", "required"] | None = (
        "none" if kind == "none" else "required" if kind in ("any", "tool") else None
    )
    options = tool_options([tool.neutral() for tool in tools], word, parallel=parallel)
    if options is None or kind == "none":
        return (), options
    if choice is not None and choice.type == "tool":
        name = choice.name or ""
        if name not in (tool.name for tool in tools):
            raise BadRequest(f"'tool_choice' names '{name}', which is not in 'tools'.", param="tool_choice")
        options = replace(options, choice="function", function=name)
    return tools, options
