"""The tools of chat requests: definitions of functions, and the tool choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from quire_server.answering.options import Tool, ToolOptions
from quire_server.dialects.common import WireModel
from quire_server.errors import BadRequest, Unsupported
from quire_server.text.parsing.parsed_reply import read_json

MAX_TOOLS = 1024  # agents with a few tool servers offer hundreds
MAX_TOOL_NAME = 256

_NAME_PATTERN = rf"^[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME}}}$"
ToolName = Annotated[str, Field(pattern=_NAME_PATTERN)]


class FunctionDefinition(WireModel):
    name: ToolName
    description: Annotated[str, Field(max_length=16_384)] | None = None
    parameters: dict[str, object] | None = Field(None, description="the arguments' JSON schema")
    strict: bool | None = Field(None, description="true: the schema of the arguments is enforced")


class ToolDefinition(WireModel):
    type: Annotated[str, Field(max_length=64)] = Field(description="function; nothing else is supported")
    function: FunctionDefinition | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> ToolDefinition:
        if self.type != "function":
            raise Unsupported(f"Tools of type '{self.type}' are not supported; only 'function' is.", param="tools")
        if self.function is None:
            raise ValueError("a tool needs a function")
        return self

    def for_template(self) -> dict[str, object]:
        """The tool in the form that chat templates expect: the client's own fields without nulls."""
        return self.model_dump(exclude_none=True)

    def neutral(self) -> Tool:
        function = self.function
        if function is None:
            raise ValueError("a tool needs a function")
        return Tool(
            name=function.name,
            description=function.description or "",
            parameters=function.parameters,
            strict=bool(function.strict),
        )


def arguments_object(text: str) -> msgspec.Raw | dict[str, object]:
    """A call's arguments as an object for a reply, as the model spelled it; empty where it is not whole."""
    try:
        is_object = isinstance(read_json(text), dict)
    except ValueError:
        is_object = False
    return msgspec.Raw(text.encode()) if is_object else {}


def template_tool(name: str, description: str | None, parameters: Mapping[str, object]) -> dict[str, object]:
    """A function as chat templates expect it, without a description where it has none."""
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


class NamedFunction(WireModel):
    name: ToolName


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, object]], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class ChosenTool(WireModel):
    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> ChosenTool:
        if (self.function if self.type == "function" else self.allowed_tools) is None:
            raise ValueError(f"a choice of the type '{self.type}' needs the field '{self.type}'")
        return self


def _word_or_object(value: object) -> object:
    """Validate a word here, since a union of a word and a model would report every error twice."""
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise ValueError("must be 'auto', 'none', 'required' or name a function")
        return value
    if isinstance(value, Mapping):
        return ChosenTool.model_validate(value)
    return value


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | ChosenTool | None,
    BeforeValidator(_word_or_object),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": ["auto", "none", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string", "pattern": _NAME_PATTERN}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
                {"type": "null"},
            ]
        }
    ),
]
Tools = Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)]


def tool_options(
    tools: list[Tool], choice: Literal["auto", "none", "required"] | ChosenTool | None, *, parallel: bool | None
) -> ToolOptions | None:
    """The tools and the choice; None where there are no tools. Raises BadRequest for an impossible choice."""
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"Two tools have the name '{twice}'.", param="tools")
    if not tools:
        if choice not in (None, "none"):
            raise BadRequest("'tool_choice' needs 'tools'.", param="tool_choice")
        return None
    mode: Literal["auto", "none", "required", "function"] = "auto"
    function: str | None = None
    if isinstance(choice, str):
        mode = choice
    elif choice is not None and choice.function is not None:
        mode, function = "function", choice.function.name
        _check_known([function], names)
    elif choice is not None and choice.allowed_tools is not None:
        mode = choice.allowed_tools.mode
        allowed = [_name_of(tool) for tool in choice.allowed_tools.tools]
        _check_known(allowed, names)
        tools = [tool for tool in tools if tool.name in allowed]
    return ToolOptions(tools=tuple(tools), choice=mode, function=function, parallel=parallel is not False)


def _name_of(tool: Mapping[str, object]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
    if not isinstance(name, str):
        raise BadRequest("An allowed tool needs its function's name.", param="tool_choice")
    return name


def _check_known(chosen: list[str], names: list[str]) -> None:
    if unknown := [name for name in chosen if name not in names]:
        raise BadRequest(
            f"'tool_choice' names '{unknown[0][:MAX_TOOL_NAME]}', which is not in 'tools'.", param="tool_choice"
        )
