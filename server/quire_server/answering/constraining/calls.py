"""Grammar rules for tool calls in the model's format.

A reply that obeys the rules parses as calls of the offered tools with valid arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from quire_server.answering.constraining.json_schema import JsonRules, SchemaRefused
from quire_server.answering.constraining.lark_in_json import in_json
from quire_server.answering.constraining.schemas import (
    ANY_TEXT,
    Schema,
    ending_in,
    expression,
    literal,
    not_beginning_with,
    parsed,
    reviewed,
    without,
    written,
)
from quire_server.answering.options import Structure, Tool, ToolOptions
from quire_server.errors import BadRequest
from quire_server.text.parsing.formats import FORCED
from quire_server.text.parsing.reasoning import TokenId
from quire_server.text.parsing.tagged import kinds_of_schema
from quire_server.text.parsing.tool_format import Parameters, ToolFormat

MAX_RULES_CHARS = 1_048_576  # of all tools' grammars
_NUMBER = "/:[0-9]{1,4}/"
_NAME = "/[A-Za-z0-9_-]{1,64}/"
_NARROWING = ("pattern", "format", "minLength", "maxLength")  # of strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The rules, and the expression that starts them."""

    start: str
    rules: tuple[str, ...]
    forced: bool  # whether there must be a call


def reading_format(tools: ToolOptions | None, model_format: ToolFormat | None) -> ToolFormat | None:
    """The format in which a reply's calls are parsed: the model's own, or plain JSON for forced calls.

    None where no call can come.
    """
    if tools is None or not tools.tools or tools.choice == "none":
        return None
    if tools.choice == "auto" or (model_format is not None and model_format.can_be_forced):
        return model_format
    return FORCED


def written_calls(
    tools: ToolOptions | None, tool_format: ToolFormat, structure: Structure | None, token_id: TokenId
) -> Calls | None:
    """The rules for a request's tools; None where calls are not constrained. Raises BadRequest."""
    if tools is None or not tools.tools or tools.choice == "none":
        return None
    forced = tools.choice != "auto"
    is_strict = any(tool.strict for tool in tools.tools)
    has_inputs = tool_format.writes_json and any(tool.input_grammar for tool in tools.tools)
    if not forced and structure is None and not is_strict and not has_inputs:
        return None
    if not tool_format.can_be_forced:
        raise BadRequest(
            "Strict tools, and tools beside a structured answer, cannot be enforced in the format in which this model"
            " writes calls; leave out 'strict', or require a call with 'tool_choice'.",
            param="tools",
        )
    if not forced and structure is not None and not tool_format.opener:
        raise BadRequest(
            "In the format in which this model writes calls they cannot be told from a structured answer; require a"
            f" call with 'tool_choice', or leave out the tools or '{structure.param}'.",
            param="tools",
        )
    return _Writer(tools, tool_format, token_id).calls(free_text=structure is None)


class _Writer:
    def __init__(self, tools: ToolOptions, tool_format: ToolFormat, token_id: TokenId) -> None:
        self._format = tool_format
        self._token_id = token_id
        self._tools = tools.tools
        if tools.choice == "function":
            self._tools = tuple(tool for tool in tools.tools if tool.name == tools.function)
        self._is_one = tools.choice == "function" or not tools.parallel or tool_format.one_call
        self._forced = tools.choice != "auto"
        self._json = JsonRules()

    def calls(self, *, free_text: bool) -> Calls:
        style = self._format.parameters
        if style is None:
            rules = [f"arguments_{i}: {self._arguments(tool)}" for i, tool in enumerate(self._tools)]
        else:
            rules = [rule for i, tool in enumerate(self._tools) for rule in self._parameters(i, tool, style)]
            rules += self._free_value(style)
        rules += self._json.lines()
        if sum(map(len, rules)) > MAX_RULES_CHARS:
            raise BadRequest(f"The tools' parameters have more than {MAX_RULES_CHARS} characters.", param="tools")
        begin, opener = self._format.begin, self._format.opener
        rules.append(f"first: {self._call(begin)}")
        more = "" if self._is_one else f" ({self._written(self._format.separator)} call)*"
        if more:
            rules.append(f"call: {self._call('')}")
        end = self._written(self._format.end)
        rules.append(f"calls: first{more} {end}".rstrip())
        start = "calls"
        if not self._forced and free_text:
            if self._format.before_answer:
                start = f"({self._written(self._format.before_answer)} TEXT? | calls)"
                rules.append(f"TEXT: {ANY_TEXT}")
            elif not opener:
                start = "(TEXT? | calls)"
                first = (begin + self._format.before_name)[0]
                rules.append(f"TEXT: {not_beginning_with(first + '{')}")
            elif self._token_id(opener) is not None:
                start = "TEXT? calls?"
                rules.append(f"TEXT: {without(opener)}")
            else:
                start = f"(TEXT? | lead opened{more} {end})"
                rules.append(f"TEXT: {without(opener)}")
                rules.append(f"lead[lazy]: {ending_in(opener)}")
                rules.append(f"opened: {self._call(begin, without=opener)}")
        return Calls(start=start, rules=tuple(rules), forced=self._forced)

    def _call(self, begin: str, *, without: str = "") -> str:
        """One call of any tool, after `begin`; the text `without` is already written."""
        form = self._format
        variants = []
        for i, tool in enumerate(self._tools):
            name = tool.name if form.bare_name else json.dumps(tool.name, ensure_ascii=False)
            named = f"{begin}{form.before_name}{name}".removeprefix(without)
            if form.numbers_calls:
                before = f"{self._written(named)} {_NUMBER} {self._written(form.between_name_and_arguments)}"
            else:
                before = self._written(named + form.between_name_and_arguments)
            variants.append(f"{before} arguments_{i}")
        return f"({' | '.join(variants)}) {self._written(form.after_call)}".rstrip()

    def _parameters(self, i: int, tool: Tool, style: Parameters) -> list[str]:
        """Rules for one tool's arguments, each on its own, in the order of its schema."""
        schema = _schema(tool) if tool.parameters is not None else {}
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            if schema.get("additionalProperties") is False:
                return [f'arguments_{i}: ""']
            part = f"{self._written(style.before)} {_NAME} {self._written(style.named)} free_value".lstrip()
            more = f"({self._written(style.separator)} {part})*"
            return [f"arguments_{i}: ({part} {more})?" if style.separator else f"arguments_{i}: ({part})*"]
        required = schema.get("required")
        names = [name for name in properties if isinstance(required, list) and name in required]
        needed = len(names)
        names += [name for name in properties if name not in names]
        rules: list[str] = []
        for j, name in enumerate(names):
            value, is_text = self._value(tool, properties[name], schema, style)
            opening = self._written(style.opening(name, is_text=is_text))
            if value == "free_value":
                rules.append(f"part_{i}_{j}: {opening} free_value")
            else:
                rules.append(f"value_{i}_{j}: {value}")
                rules.append(f"part_{i}_{j}: {opening} value_{i}_{j} {self._written(style.after)}".rstrip())
        if style.separator:
            return [*rules, *self._separated(i, len(names), needed, style.separator)]
        parts = {name: f"part_{i}_{j}" if j < needed else f"part_{i}_{j}?" for j, name in enumerate(names)}
        return [*rules, f"arguments_{i}: {' '.join(parts[name] for name in properties)}"]

    def _separated(self, i: int, count: int, needed: int, separator: str) -> list[str]:
        """Rules for the parts of one tool with a separator between them; the first ones must be there."""
        rules = []
        for j in range(1, count):
            part = f"({self._written(separator)} part_{i}_{j}){'' if j < needed else '?'}"
            rules.append(f"more_{i}_{j}: {part} {f'more_{i}_{j + 1}' if j + 1 < count else ''}".rstrip())
        firsts = [
            f"part_{i}_{j} {f'more_{i}_{j + 1}' if j + 1 < count else ''}".rstrip()
            for j in range(1 if needed else count)
        ]
        start = firsts[0] if needed else f"({' | '.join(firsts)})?"
        return [*rules, f"arguments_{i}: {start}"]

    def _value(self, tool: Tool, schema: object, root: Schema, style: Parameters) -> tuple[str, bool]:
        """The right side of a value's rule, or `free_value`; and whether it is a string. Raises BadRequest."""
        kinds = kinds_of_schema(schema)
        known = schema if isinstance(schema, Mapping) else {}
        definitions: Schema = {name: root[name] for name in ("$defs", "definitions") if name in root}
        if style.quotes:
            return self._value_of(tool, {**known, **definitions}), False
        constants = [known["const"]] if "const" in known else known.get("enum")
        if isinstance(constants, list) and constants and "string" in kinds:
            shown = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in constants]
            return " | ".join(map(literal, shown)), kinds == {"string"}
        if "string" not in kinds and known:
            return self._value_of(tool, {**known, **definitions}), False
        if tool.strict and (narrowed := next((name for name in _NARROWING if name in known), None)):
            raise BadRequest(
                f"The parameters of the tool {tool.name[:64]!r} cannot be enforced: in the format in which this model"
                f" writes calls, {narrowed!r} of a string is not supported.",
                param="tools",
            )
        return "free_value", kinds == {"string"} or not known

    def _free_value(self, style: Parameters) -> list[str]:
        """Rules for a value that is any text, with what follows it."""
        if style.quotes:
            return [f"free_value: {self._json.value({})}"]
        end = style.after.rstrip("\n")
        rest = self._written(style.after[len(end) :])
        if end in self._format.markers and self._token_id(end) is not None:
            closed = written(end, [end], self._token_id)
            return [f"free_value: FREE? {closed} {rest}", f"FREE: {without(end)}"]
        return [f"free_value: free_text {rest}", f"free_text[lazy]: {ending_in(end)}"]

    def _arguments(self, tool: Tool) -> str:
        """The right side of a tool's rule for arguments; without `strict`, as much of its schema as possible."""
        if tool.parameters is None:
            return self._json.value({"type": "object"})
        if tool.input_grammar:
            return _input(tool)
        return self._value_of(tool, _schema(tool))

    def _value_of(self, tool: Tool, schema: Schema) -> str:
        """The rule of a JSON value by the tool's schema or a part of it. Raises BadRequest."""
        try:
            return self._json.value(schema, lenient=not tool.strict)
        except SchemaRefused as refusal:
            raise _refused(tool, refusal) from None

    def _written(self, value: str) -> str:
        return written(value, self._format.markers, self._token_id)


def _input(tool: Tool) -> str:
    """Arguments whose one text is of the tool's own grammar."""
    lark = f"start: {expression(tool.input_grammar)}" if tool.input_syntax == "regex" else tool.input_grammar
    try:
        begin, end = literal('{"input": "'), literal('"}')
        return f"{begin} %lark {{\n{in_json(lark)}\n}} {end}"
    except SchemaRefused as refusal:
        raise BadRequest(
            f"The grammar of the tool {tool.name[:64]!r} cannot be enforced: {refusal}.", param="tools"
        ) from None


def _schema(tool: Tool) -> Schema:
    """The schema of a tool's arguments. Raises BadRequest."""
    try:
        as_text = json.dumps(tool.parameters)
        schema = reviewed(parsed(as_text), lenient=not tool.strict)
        if schema.setdefault("type", "object") != "object":
            raise SchemaRefused("the schema must be of an object")
    except (SchemaRefused, ValueError, RecursionError) as refusal:
        raise _refused(tool, refusal) from None
    return schema


def _refused(tool: Tool, refusal: Exception) -> BadRequest:
    return BadRequest(f"The parameters of the tool {tool.name[:64]!r} cannot be enforced: {refusal}.", param="tools")
