"""A reply through the parser, in pieces: what a client would have been sent, joined.

Must not know: torch, the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from quire_server.text.parsing.formats import tool_format
from quire_server.text.parsing.parsed_reply import Schemas, whole_calls
from quire_server.text.parsing.reasoning import ThinkingMarks
from quire_server.text.parsing.reply_parser import ReplyParser
from quire_server.text.parsing.tool_format import Parameters, ToolFormat

TOOLS: Schemas = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": ["boolean", "null"]},
            "place": {"type": "object"},
        },
    },
    "get_time": None,
}
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name, arguments
    ids: tuple[str | None, ...] = ()
    error: str | None = None
    num_reasoning_tokens: int = 0

    def without_count(self) -> Parsed:
        """Comparable with the same text in other tokens."""
        return replace(self, num_reasoning_tokens=0)


def parse(
    pieces: Iterable[str | tuple[int, str]],
    form: str | None = None,
    *,
    tools: Schemas = TOOLS,
    marks: ThinkingMarks | None = None,
    is_open: bool = False,
    parallel: bool = True,
) -> Parsed:
    """Each piece is a token's text, with its id where that matters."""
    parser = ReplyParser(
        marks=marks,
        is_open=is_open,
        tool_format=tool_format(form) if form is not None else None,
        tools=tools,
        parallel=parallel,
        new_id=_numbered().__next__,
    )
    content = [parser.push(*(piece if isinstance(piece, tuple) else (NO_TOKEN, piece))) for piece in pieces]
    content.append(parser.finish())
    num_begun = 0
    for call in parser.calls:
        assert (call.id is not None) == (call.name is not None) == (call.index == num_begun)
        num_begun += call.index == num_begun
    calls = whole_calls(parser.calls)
    assert parser.has_calls == bool(calls)
    return Parsed(
        content="".join(content),
        reasoning=parser.reasoning,
        calls=tuple((call.name or "", call.arguments) for call in calls),
        ids=tuple(call.id for call in calls),
        error=parser.call_error,
        num_reasoning_tokens=parser.num_reasoning_tokens,
    )


def written(form: ToolFormat, calls: Iterable[tuple[str, str]]) -> str:
    """The calls, each a name and arguments in JSON, as a grammar makes a model write them."""
    texts = [
        form.before_name
        + (name if form.bare_name else json.dumps(name))
        + (f":{number}" if form.numbers_calls else "")
        + form.between_name_and_arguments
        + (arguments if form.parameters is None else _one_by_one(form.parameters, json.loads(arguments)))
        + form.after_call
        for number, (name, arguments) in enumerate(calls)
    ]
    return form.begin + form.separator.join(texts) + form.end


def _one_by_one(style: Parameters, arguments: dict[str, object]) -> str:
    texts = [
        (name, value) if isinstance(value, str) else (name, json.dumps(value)) for name, value in arguments.items()
    ]
    if style.quotes:
        texts = [(name, json.dumps(value)) for name, value in arguments.items()]
    return style.separator.join(
        style.opening(name, is_text=isinstance(arguments[name], str)) + text + style.after for name, text in texts
    )


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, cut at these places modulo its length."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def check_cuts(form: str, text: str, expected: Parsed) -> None:
    """The text by characters, and cut in two at every place."""
    for pieces in (list(text), *(cut(text, [place]) for place in range(1, len(text)))):
        assert parse(pieces, form) == expected, pieces


def _numbered() -> Iterator[str]:
    number = 0
    while True:
        yield f"call_{number}"
        number += 1
