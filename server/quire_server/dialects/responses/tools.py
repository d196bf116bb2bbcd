"""The tools of /v1/responses: functions, functions in namespaces, custom tools whose input is a text, and the choice.

The prompt has functions alone: one of a namespace is `namespace__name`, a custom tool is a function with one argument,
`input`. Replies name them as the request did.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from quire_server.answering.options import Tool, ToolOptions
from quire_server.dialects import tools as neutral
from quire_server.dialects.common import WireModel, review_extras
from quire_server.dialects.tools import MAX_TOOLS, ChosenTool, NamedFunction, ToolName, template_tool, tool_options
from quire_server.errors import BadRequest, Unsupported

_MAX_DEFINITION = 65_536  # characters
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_Description = Annotated[str, Field(max_length=16_384)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A tool in the form of the prompt, and its name in items."""

    tool: Tool
    name: str
    namespace: str | None
    is_custom: bool

    def for_template(self) -> dict[str, object]:
        parameters = self.tool.parameters or {"type": "object", "properties": {}}
        return template_tool(self.tool.name, self.tool.description, parameters)


def flat_name(namespace: str | None, name: str) -> str:
    """The name that the model knows a tool by."""
    return name if namespace is None else f"{namespace}__{name}"


def input_arguments(text: str) -> str:
    """The call's arguments that give a custom tool this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


class FunctionTool(WireModel):
    type: Literal["function"]
    name: ToolName
    description: _Description | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of the arguments")
    strict: bool | None = Field(None, description="true: the arguments always follow the schema")

    def offered(self, namespace: str | None = None) -> list[Offered]:
        tool = Tool(
            name=flat_name(namespace, self.name),
            description=self.description or "",
            parameters=self.parameters,
            strict=bool(self.strict),
        )
        return [Offered(tool=tool, name=self.name, namespace=namespace, is_custom=False)]

    def shown(self) -> dict[str, object]:
        """The tool as the reply repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }

    def without_effect(self) -> list[str]:
        return review_extras(self.model_extra)


class AnyText(WireModel):
    type: Literal["text"]


class TextGrammar(WireModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=_MAX_DEFINITION)]


class CustomTool(WireModel):
    type: Literal["custom"]
    name: ToolName
    description: _Description | None = None
    format: Annotated[AnyText | TextGrammar, Field(discriminator="type")] | None = Field(
        None, description="the form of the input: any text, or texts of a grammar, which is enforced"
    )

    def offered(self, namespace: str | None = None) -> list[Offered]:
        words, form = [self.description] if self.description else [], self.format
        bound = form if isinstance(form, TextGrammar) else None
        if bound is not None:
            kind = "Lark grammar" if bound.syntax == "lark" else "regular expression"
            words.append(f"The input is a text of this {kind}:\n{bound.definition}")
        tool = Tool(
            name=flat_name(namespace, self.name),
            description="\n\n".join(words),
            parameters=_INPUT,
            input_grammar="" if bound is None else bound.definition,
            input_syntax="lark" if bound is None else bound.syntax,
        )
        return [Offered(tool=tool, name=self.name, namespace=namespace, is_custom=True)]

    def shown(self) -> dict[str, object]:
        form = {"type": "text"} if self.format is None else self.format.model_dump()
        return {"type": "custom", "name": self.name, "description": self.description, "format": form}

    def without_effect(self) -> list[str]:
        return review_extras(self.model_extra)


class NamespaceTool(WireModel):
    type: Literal["namespace"]
    name: ToolName
    description: _Description | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(fail_fast=True, max_length=MAX_TOOLS),
    ]

    def offered(self) -> list[Offered]:
        """The namespace's tools; the first one also has the description of all."""
        found = [each for tool in self.tools for each in tool.offered(self.name)]
        if found and self.description:
            first = found[0].tool
            words = f"{self.description}\n\n{first.description}".rstrip()
            found[0] = replace(found[0], tool=replace(first, description=words))
        return found

    def shown(self) -> dict[str, object]:
        tools = [tool.shown() for tool in self.tools]
        return {"type": "namespace", "name": self.name, "description": self.description, "tools": tools}

    def without_effect(self) -> list[str]:
        return review_extras(self.model_extra) + [name for tool in self.tools for name in tool.without_effect()]


class WebSearchTool(WireModel):
    """Codex's search, which it offers in every request, with access to the web or without: there is none here."""

    type: Literal["web_search"]
    external_web_access: bool

    def offered(self) -> list[Offered]:
        return []

    def shown(self) -> dict[str, object]:
        return self.model_dump()

    def without_effect(self) -> list[str]:
        return [self.type]


def _kind(value: object) -> str | None:
    """The type of a tool, which selects its model. Raises BadRequest for OpenAI's own tools."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    if kind == "web_search" and isinstance(value, dict) and "external_web_access" not in value:
        raise Unsupported(
            "Tools of type 'web_search' are not supported: this server asks no other. With 'external_web_access', as"
            " Codex sends it, the tool is accepted without effect.",
            param="tools",
        )
    if kind not in _KINDS:
        raise Unsupported(f"Tools of type '{kind[:64]}' are not supported; {', '.join(_KINDS)} are.", param="tools")
    return kind


_KINDS = ("function", "custom", "namespace", "web_search")


def _check_fields(value: object) -> object:
    if isinstance(value, dict) and "name" not in value and isinstance(value.get("function"), dict):
        raise ValueError("here a tool's name, description and parameters are its own fields, not those of 'function'")
    return value


ResponseTool = FunctionTool | CustomTool | NamespaceTool | WebSearchTool
Tools = Annotated[
    list[
        Annotated[
            Annotated[FunctionTool, Tag("function")]
            | Annotated[CustomTool, Tag("custom")]
            | Annotated[NamespaceTool, Tag("namespace")]
            | Annotated[WebSearchTool, Tag("web_search")],
            Discriminator(
                _kind, custom_error_type="tool_type", custom_error_message="expected an object with a 'type'"
            ),
            BeforeValidator(_check_fields),
        ]
    ],
    Field(fail_fast=True, max_length=MAX_TOOLS),
]


class NamedTool(WireModel):
    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class AllowedTools(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


def _check_choice(value: object) -> object:
    if not isinstance(value, dict) and value not in ("none", "auto", "required", None):
        raise ValueError("expected 'none', 'auto', 'required' or an object")
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools"):
        raise Unsupported(
            f"A 'tool_choice' of type '{kind[:64]}' is not supported; 'function', 'custom' and 'allowed_tools' are.",
            param="tool_choice",
        )
    return value


Choice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")],
    BeforeValidator(_check_choice),
]


def all_offered(tools: Iterable[ResponseTool]) -> dict[str, Offered]:
    """The tools by the names that the model knows them by. Raises BadRequest for two of one name."""
    found: dict[str, Offered] = {}
    for tool in tools:
        for each in tool.offered():
            if each.tool.name in found:
                raise BadRequest(f"Two tools have the name '{each.tool.name}'.", param="tools")
            found[each.tool.name] = each
    if len(found) > MAX_TOOLS:
        raise BadRequest(f"At most {MAX_TOOLS} tools may be offered, those of namespaces counted.", param="tools")
    return found


def offered(
    tools: Mapping[str, Offered], choice: str | NamedTool | AllowedTools | None, *, parallel: bool | None
) -> tuple[list[Offered], ToolOptions | None]:
    """The tools in the prompt, and the options for calls. Raises BadRequest for an impossible choice.

    The choice "none" leaves the tools in the prompt, which begins as in the turns before. The choice "auto" needs no
    tools: clients always send it.
    """
    chosen: Any = None if choice == "auto" else choice
    if isinstance(choice, NamedTool):  # not validated again: a flat name may be longer than a client's
        function = NamedFunction.model_construct(name=flat_name(choice.namespace, choice.name))
        chosen = ChosenTool.model_construct(type="function", function=function)
    elif isinstance(choice, AllowedTools):
        names: list[dict[str, object]] = [{"name": flat_name(tool.namespace, tool.name)} for tool in choice.tools]
        allowed = neutral.AllowedTools.model_construct(mode=choice.mode, tools=names)
        chosen = ChosenTool.model_construct(type="allowed_tools", allowed_tools=allowed)
    options = tool_options([each.tool for each in tools.values()], chosen, parallel=parallel)
    return [] if options is None else [tools[tool.name] for tool in options.tools], options
