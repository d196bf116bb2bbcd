"""The grammar of one request's reply: thoughts first where the model may think, then the answer or tool calls.

A request gets a grammar exactly when it asks for a constraint, and then its whole reply obeys it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from quire_server.answering.constraining.calls import Calls, written_calls
from quire_server.answering.constraining.json_schema import SchemaRefused
from quire_server.answering.constraining.schemas import (
    ending_in,
    expression,
    json_value,
    literal,
    parsed,
    reviewed,
    without,
    written,
)
from quire_server.answering.options import GenerationOptions, Structure
from quire_server.errors import BadRequest
from quire_server.text.grammar_check import Grammar
from quire_server.text.parsing.reasoning import ThinkingMarks, TokenId
from quire_server.text.parsing.tool_format import ToolFormat

_SPACE_AFTER_THOUGHTS = "/[ \\t\\r\\n]{1,8}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """A block of thoughts before the answer, opened by the model or already by the prompt."""

    marks: ThinkingMarks
    is_open: bool
    is_asked: bool = False  # the request switches thinking on


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A grammar, and the field that asked for it."""

    grammar: Grammar
    param: str
    opener: int | None = None  # the mark that opens thoughts, where the model alone decides whether it thinks


def constraint(
    options: GenerationOptions, *, tool_format: ToolFormat | None, thinking: Thinking | None, token_id: TokenId
) -> Constraint | None:
    """The constraint on this request's reply, or None. `tool_format`: the format of its calls; None: no calls.

    Raises BadRequest for a constraint that cannot be enforced.
    """
    structure = options.structure
    answer = None if structure is None else _answer(structure)
    calls = None if tool_format is None else written_calls(options.tools, tool_format, structure, token_id)
    if answer is None and calls is None:
        return None
    opener = None
    if thinking is not None and not thinking.is_open and not thinking.is_asked:
        opener = token_id(thinking.marks.start)
        if opener is None:  # beside a mark in words the engine cannot tell which of its tokens are the answer's
            thinking = None
    rules = [f"start: {_start(answer, calls, thinking, token_id)}"]
    if thinking is not None:
        rules += _thoughts(thinking, token_id)
    if answer is not None and (calls is None or not calls.forced):
        rules.append(f"answer: {answer}")
    if calls is not None:
        rules += calls.rules
    is_clients = structure is not None and structure.kind == "grammar"
    client = structure.value if structure is not None and is_clients and any("@client" in r for r in rules) else ""
    if client and len(rules) == 2:
        rules = ["start: @client"]
    param = structure.param if structure is not None else "tools"
    return Constraint(grammar=Grammar(rules="\n".join(rules), client=client), param=param, opener=opener)


def _start(answer: str | None, calls: Calls | None, thinking: Thinking | None, token_id: TokenId) -> str:
    marks = None if thinking is None else thinking.marks
    free = "answer"
    if marks is not None and marks.before_answer:
        free = f"{written(marks.before_answer, marks.markers, token_id)} answer"
    if calls is None:
        reply = free
    elif answer is None or calls.forced:
        reply = calls.start
    else:
        reply = f"({free} | {calls.start})"
    if thinking is None or marks is None:
        return reply
    after = written(marks.after, marks.markers, token_id) if marks.after else "SPACE?"
    if thinking.is_open:
        return f"thoughts {after} {reply}"
    return f"({written(marks.start, marks.markers, token_id)} thoughts {after})? {reply}"


def _thoughts(thinking: Thinking, token_id: TokenId) -> Sequence[str]:
    """Rules for the block of thoughts after its opening mark, with its closing mark."""
    end = thinking.marks.end
    space = f"SPACE: {_SPACE_AFTER_THOUGHTS}"
    if token_id(end) is None:
        return [f"thoughts[lazy]: {ending_in(end)}", space]
    closed = written(end, thinking.marks.markers, token_id)
    return [f"thoughts: THOUGHTS? {closed}", f"THOUGHTS: {without(end)}", space]


def _answer(structure: Structure) -> str:
    """The right side of the answer's rule. Raises BadRequest."""
    try:
        match structure.kind:
            case "json_object":
                return json_value({"type": "object"}, compact=structure.compact)
            case "json_schema":
                return json_value(reviewed(parsed(structure.value)), compact=structure.compact)
            case "regex":
                return expression(structure.value)
            case "choice":
                return " | ".join(literal(choice) for choice in json.loads(structure.value))
            case "grammar":
                return "@client"
    except SchemaRefused as refusal:
        raise BadRequest(f"'{structure.param}' cannot be enforced: {refusal}.", param=structure.param) from None
