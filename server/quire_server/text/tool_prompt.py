"""Tools told in words, for models whose chat template has no place for them.

Promises: what a reply must look like to be a call is said once, before the conversation; earlier calls and their
results stay in it as text. Must not know: templates, tokenizers, how replies are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_INTRODUCTION = (
    "You can call functions. To call one, answer with nothing but JSON: "
    '{"name": the function\'s name, "arguments": an object of its arguments}. '
    "For several calls at once, answer with a JSON array of such objects. You will be told the results. "
    "Answer in words where no function fits. The functions:"
)


def told_of_tools(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[Mapping[str, object]]:
    """The conversation with the tools in its system message, and with calls and results as plain messages."""
    text = "\n".join([_INTRODUCTION, *(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)])
    names: dict[object, object] = {}
    plain = [_as_text(message, names) for message in messages]
    first = plain[0] if plain else {}
    content = first.get("content")
    if first.get("role") in ("system", "developer") and isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _as_text(message: Mapping[str, object], names: dict[object, object]) -> Mapping[str, object]:
    """`names` collects the functions' names by the ids of their calls."""
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls:
        written = []
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(call, Mapping) or not isinstance(function, Mapping):
                continue
            names[call.get("id")] = function.get("name")
            written.append({"name": function.get("name"), "arguments": _parsed(function.get("arguments"))})
        content = message.get("content")
        before = f"{content}\n" if isinstance(content, str) and content else ""
        shown = json.dumps(written[0] if len(written) == 1 else written, ensure_ascii=False)
        return {"role": message.get("role"), "content": before + shown}
    if message.get("role") in ("tool", "function"):
        name = message.get("name") or names.get(message.get("tool_call_id")) or "the function"
        return {"role": "user", "content": f"The result of {name}: {_text(message.get('content'))}"}
    return message


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _text(content: object) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
