"""The tools of a response, and which of them may or must be called.

Promises: what validates are functions with names of their own, and a choice among them. Must not know: how calls are
written or read, templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quire_server.answering.options import Tool, ToolOptions
from quire_server.errors import BadRequest
from quire_server.wire.common import WireModel
from quire_server.wire.tools import MAX_TOOLS, ChosenTool, ToolName, tool_options


def _check_tool(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise BadRequest(
            f"Tools of type '{kind[:64]}' are not supported; only 'function' is.",
            param="tools",
            code="unsupported_parameter",
        )
    if isinstance(value, dict) and "name" not in value and isinstance(value.get("function"), dict):
        raise ValueError("here a tool's name, description and parameters are its own fields, not those of 'function'")
    return value


class FunctionTool(WireModel):
    type: Literal["function"]
    name: ToolName
    description: Annotated[str, Field(max_length=16_384)] | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of the arguments")
    strict: bool | None = Field(None, description="true: the arguments always follow the schema")

    def neutral(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters,
            strict=bool(self.strict),
        )

    def for_template(self) -> dict[str, object]:
        function: dict[str, object] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}

    def shown(self) -> dict[str, object]:
        """As the reply repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


Tools = Annotated[
    list[Annotated[FunctionTool, BeforeValidator(_check_tool)]], Field(fail_fast=True, max_length=MAX_TOOLS)
]


class NamedFunction(WireModel):
    type: Literal["function"]
    name: ToolName


class AllowedTools(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


def _check_choice(value: object) -> object:
    if not isinstance(value, dict) and value not in ("none", "auto", "required", None):
        raise ValueError("expected 'none', 'auto', 'required' or an object")
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise BadRequest(
            f"A 'tool_choice' of type '{kind[:64]}' is not supported; 'function' and 'allowed_tools' are.",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return value


Choice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedFunction | AllowedTools, Field(discriminator="type")],
    BeforeValidator(_check_choice),
]


def offered(
    tools: Sequence[FunctionTool], choice: str | NamedFunction | AllowedTools | None, *, parallel: bool | None
) -> tuple[list[FunctionTool], ToolOptions | None]:
    """The tools that the model is told of, and which it may or must call. Raises BadRequest for a choice that is none.

    With the choice "none" it is told of none. The choice "auto" needs no tools: clients send it always.
    """
    chosen: Any = choice
    if isinstance(choice, NamedFunction):
        chosen = ChosenTool.model_validate({"type": "function", "function": {"name": choice.name}})
    elif isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": [{"name": tool.name} for tool in choice.tools]}
        chosen = ChosenTool.model_validate({"type": "allowed_tools", "allowed_tools": allowed})
    elif choice == "auto":
        chosen = None
    options = tool_options([tool.neutral() for tool in tools], chosen, parallel=parallel)
    names = set() if options is None or options.choice == "none" else {tool.name for tool in options.tools}
    return [tool for tool in tools if tool.name in names], options
