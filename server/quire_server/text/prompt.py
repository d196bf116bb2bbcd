"""Renders chat messages to a prompt with the model's chat template, in processes that can be killed."""

from __future__ import annotations

import json
import queue
import re
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_server.errors import BadRequest, ContextLengthExceeded, NotReady
from quire_server.text import spelled_json
from quire_server.text.tokenizer import DEFAULT, SPECIAL_NAMES, TOOL_USE, TextTokenizer
from quire_server.text.worker_process import FROM_OUTSIDE, ProcessDied, WorkerProcess

_SCRIPT = Path(__file__).with_name("template_worker.py")
_MEMORY_BYTES = 512 * 2**20
_NUM_PROCESSES = 2  # a render takes about a millisecond; the second process is for others during a slow render
_RESERVED = frozenset({
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "tokenizer", "tokenizer_kwargs", "conversation", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", *SPECIAL_NAMES,
})  # fmt: skip
_USUAL_ROLES = frozenset({"system", "user", "assistant"})
_OPTIONAL_FIELDS = ("tool_calls", "function_call")  # fields of messages that a template may not show
_PROBE = "Xq7probe"
_PROBE_ID = f"{_PROBE}1"  # nine letters and digits, which some templates want


class ChatTemplate:
    """One model's chat template. Safe to call from many threads; `render` blocks, so do not call it on the event loop.

    A template or its input can cost at most a few seconds and a bounded memory of another process; an error in it is a
    BadRequest. Message text is data: it is never interpreted as a template.

    Content in text parts is passed as it is to templates that handle parts; for others the parts are joined by
    newlines, as in vLLM. A template that handles only parts gets text as one part. Null content is empty text. The role
    "developer" is the newer name of "system": a template without that name gets the older one.

    Templates write their special tokens themselves: encode the text without adding any.
    """

    def __init__(
        self,
        source: str,
        tokenizer: TextTokenizer,
        default_kwargs: Mapping[str, object] | None = None,
        *,
        variants: Mapping[str, str] | None = None,
        name: str = DEFAULT,
        max_chars: int = 2**20,
        time_limit: float = 2.0,
    ) -> None:
        """`variants`: sources of the model's other templates by their names, of which `chosen` chooses.

        `max_chars` bounds the rendered prompt, `time_limit` (seconds) each render. Raises ModelLoadError for a source
        that does not compile, ConfigError for defaults that no template uses.
        """
        self.name = name
        self.tokenizer = tokenizer
        self._max_chars = max_chars
        self._patience = 2 * time_limit
        processes = [
            WorkerProcess(_SCRIPT, {"source": source}, time_limit=time_limit, memory_bytes=_MEMORY_BYTES)
            for _ in range(_NUM_PROCESSES)
        ]
        self._processes = tuple(processes)
        self._close = weakref.finalize(self, _stop_all, processes)
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for process in processes:
            self._idle.put(process)
        names, words = _compiled(
            processes[-1], "the chat template" if name == DEFAULT else f"the chat template {name!r}"
        )
        self._words = frozenset(words)
        self.variables: frozenset[str] = frozenset(n for n in names if n not in _RESERVED and not n.startswith("_"))
        self.shows_tools = "tools" in names
        self.shows_pairs = {"query", "document"} <= self._words  # whether it makes a prompt of two texts to compare
        given = dict(default_kwargs or {})
        self._defaults = {key: value for key, value in given.items() if key in self.variables}
        self._variants = {
            each: ChatTemplate(text, tokenizer, given, name=each, max_chars=max_chars, time_limit=time_limit)
            for each, text in (variants or {}).items()
        }
        unknown = given.keys() - self.variables.union(*(each.variables for each in self._variants.values()))
        if unknown and name == DEFAULT:  # a variant need not know what another one does
            raise ConfigError(f"chat template defaults: the template has no variable {_listed(unknown)}")
        self._takes_text, self._takes_parts = self._probe()
        self._takes_objects = not self.shows_tools or "tool_calls" not in self._words or self._shows_objects()
        self._has_channels = "<|channel|>analysis" in source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        """The prompt's text. `kwargs` that the template does not use have no effect; see `unnamed`.

        With `continue_final_message` the text ends with the last message's content, and its turn stays open; its calls
        would come after that, so a message with calls is refused. If the template has no tools, a system message
        describes them.

        Raises BadRequest for input that the template refuses, fails on, or cannot render within its limits.
        """
        if not messages:
            raise BadRequest("messages must not be empty.", param="messages")
        if add_generation_prompt and continue_final_message:
            raise BadRequest(
                "continue_final_message and add_generation_prompt cannot both be true.", param="continue_final_message"
            )
        if continue_final_message and any(messages[-1].get(name) for name in _OPTIONAL_FIELDS):
            raise BadRequest(
                "continue_final_message: the last message calls tools; the next message must have their results.",
                param="continue_final_message",
            )
        if reserved := [name for name in kwargs or {} if name in _RESERVED or name.startswith("_")]:
            raise BadRequest(f"'chat_template_kwargs' cannot set {_listed(reserved)}.", param="chat_template_kwargs")
        if exceeds(
            (messages, tools, kwargs or {}), 2 * self._max_chars
        ):  # twice, since the template may not show all of it
            raise self._too_long()
        if tools and not self.shows_tools:
            messages = describe_tools(messages, tools)
        chat = [self._plain(message, i) for i, message in enumerate(messages)]
        mark = f"Xq7{secrets.token_hex(8)} "
        if continue_final_message:
            _append_mark(chat[-1], mark)
        asked = {name: value for name, value in (kwargs or {}).items() if name in self.variables}
        text = self._run(chat, add_generation_prompt, {**self._defaults, **asked}, tools)
        return _cut_at_mark(text, mark) if continue_final_message else text

    def unnamed(
        self, messages: Sequence[Mapping[str, object]], kwargs: Mapping[str, object]
    ) -> dict[str, Sequence[str]]:
        """Variables, roles and fields of a request that the template does not name and so may not show."""
        roles = dict.fromkeys(str(self._role(message)) for message in messages)
        return {
            "variable": [name for name in kwargs if name not in self.variables],
            "role": [role for role in roles if role not in _USUAL_ROLES and role not in self._words],
            "field": [
                name
                for name in _OPTIONAL_FIELDS
                if name not in self._words and any(message.get(name) for message in messages)
            ],
        }

    @property
    def processes(self) -> tuple[WorkerProcess, ...]:
        """The processes of this template and its variants."""
        return (*self._processes, *(process for each in self._variants.values() for process in each.processes))

    def chosen(self, *, has_tools: bool = False, name: str | None = None) -> ChatTemplate:
        """The template for a request: the one of that name, else the one for tools where it has some, else this one.

        Raises BadRequest for a name that the model has no template of.
        """
        if name is None:
            return self._variants.get(TOOL_USE, self) if has_tools else self
        if name == self.name:
            return self
        if name not in self._variants:
            known = ", ".join(map(repr, (self.name, *self._variants)))
            raise BadRequest(
                f"'chat_template' names one of the model's templates, here {known}; requests cannot bring templates"
                " of their own.",
                param="chat_template",
                code="unsupported_parameter",
            )
        return self._variants[name]

    def close(self) -> None:
        """End the template processes; also done when the object or the interpreter goes away."""
        for each in self._variants.values():
            each.close()
        self._close()

    def _run(
        self,
        chat: list[dict[str, object]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        variables = {
            "documents": None,  # templates test whether there are any
            **kwargs,
            **self.tokenizer.special_tokens,
            "messages": chat,
            "tools": list(tools) or None,  # as for documents
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = spelled_json.write({"variables": variables, "max_chars": self._max_chars}, ensure_ascii=True)
        except (TypeError, ValueError, RecursionError) as exc:
            raise BadRequest("The messages are nested too deeply or hold values that are not JSON.") from exc
        try:
            process = self._idle.get(timeout=self._patience)
        except queue.Empty as exc:
            raise NotReady("All chat template processes are busy; retry later.", retry_after_seconds=1.0) from exc
        try:
            reply = process.ask(line)
        except ProcessDied as exc:
            if exc.signal in FROM_OUTSIDE:  # twice: neither the template's fault nor that of the messages
                raise NotReady("The chat template's process was ended; retry.", retry_after_seconds=1.0) from exc
            raise BadRequest("The chat template did not finish within its limits.", param="messages") from exc
        finally:
            self._idle.put(process)
        if "text" in reply:
            return str(reply["text"])
        if reply["error"] == "too_long":
            raise self._too_long()
        outcome = "refused these messages" if reply["error"] == "raised" else "failed on these messages"
        raise BadRequest(f"The chat template {outcome}: {reply['message']}", param="messages")

    def _too_long(self) -> ContextLengthExceeded:
        return ContextLengthExceeded(f"The prompt is longer than {self._max_chars} characters.", param="messages")

    def _probe(self) -> tuple[bool, bool]:
        """Whether the template shows content given as text, and content given as parts; found out by rendering."""
        try:
            parts = self._run([{"role": "user", "content": [_part(_PROBE)]}], True, self._defaults)
        except BadRequest as exc:
            if isinstance(exc.__cause__, ProcessDied):
                return True, False
            parts = ""
        try:
            text = self._run([{"role": "user", "content": _PROBE}], True, self._defaults)
        except BadRequest:
            text = ""
        printed_as_object = re.search(rf"""["']text["']\s*:\s*["']{_PROBE}""", parts) is not None
        takes_parts = _PROBE in parts and not printed_as_object
        return _PROBE in text or not takes_parts, takes_parts

    def _shows_objects(self) -> bool:
        """Whether the template can show a call's arguments as an object; some only join them as text."""

        def shown(arguments: object) -> str:
            call = {"id": _PROBE_ID, "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
            content = _PROBE if self._takes_text else [_part(_PROBE)]
            chat: list[dict[str, object]] = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "" if self._takes_text else [], "tool_calls": [call]},
            ]
            try:
                return self._run(chat, False, self._defaults)
            except BadRequest:
                return ""

        return f"'{_PROBE}': " not in (text := shown({_PROBE: 1})) and (text != "" or not shown("{}"))

    def _plain(self, message: Mapping[str, object], index: int) -> dict[str, object]:
        """A copy of the message in the form for this template."""
        plain = {**message, "role": self._role(message)}
        texts = _texts(message.get("content"), index)
        if isinstance(texts, list):
            plain["content"] = [_part(text) for text in texts] if self._takes_parts else "\n".join(texts)
        else:
            plain["content"] = texts if self._takes_text else [_part(texts)]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:  # templates and clients disagree on the name
            plain["reasoning_content"] = plain["reasoning"] = reasoning
        calls = message.get("tool_calls")
        if not calls:  # some templates ask only whether the field is there
            plain.pop("tool_calls", None)
        elif isinstance(calls, list):
            plain["tool_calls"] = [self._with_arguments(call) for call in calls]
        if self._has_channels and reasoning is not None:
            content = plain["content"]
            if calls and content and isinstance(content, str):  # the template has room for one text before a call
                plain["content"], reasoning = "", f"{reasoning}\n{content}"
            plain["thinking"] = reasoning
        return plain

    def _with_arguments(self, call: object) -> object:
        """The call with its arguments as an object: clients send JSON text, and most templates expect the object."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            return call
        arguments = _parsed(function.get("arguments"))
        if not isinstance(arguments, dict) or (arguments and not self._takes_objects):
            return call
        return {**call, "function": {**function, "arguments": arguments if self._takes_objects else "{}"}}

    def _role(self, message: Mapping[str, object]) -> object:
        role = message.get("role")
        return "system" if role == "developer" and role not in self._words else role


def _compiled(process: WorkerProcess, what: str) -> tuple[list[str], list[str]]:
    """Start the process; returns the names that the template reads, and the words in it. Raises ModelLoadError."""
    try:
        reply = process.start()
    except ProcessDied as exc:
        raise ModelLoadError(f"{what} could not be compiled within its limits") from exc
    names, words = reply.get("variables"), reply.get("words")
    if not isinstance(names, list) or not isinstance(words, list):
        raise ModelLoadError(f"{what} does not compile: {reply.get('message')}")
    return names, words


def _stop_all(processes: Iterable[WorkerProcess]) -> None:
    for process in processes:
        process.stop()


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _texts(content: object, index: int) -> str | list[str]:
    """A message's content as a text, or as the texts of its parts."""
    where = f"messages[{index}].content"
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text, a list of text parts or null.", param=where)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise BadRequest(f"{where} has a part that is not text; this model reads text only.", param=where)
        texts.append(text)
    return texts


def _append_mark(message: dict[str, object], mark: str) -> None:
    """Append `mark` to the message's text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
    elif isinstance(content, list) and content:
        content[-1] = _part(content[-1]["text"] + mark)
    else:
        raise BadRequest("continue_final_message needs text in the last message.", param="continue_final_message")


def _cut_at_mark(text: str, mark: str) -> str:
    """The text before the mark. If the template trimmed the mark's space, it would have trimmed the message's too."""
    at = text.rfind(mark.strip())
    if at < 0:
        raise BadRequest(
            "continue_final_message: the chat template does not show the last message.", param="continue_final_message"
        )
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:64]) for name in sorted(names))


_PER_VALUE = 8  # characters that count for a number, a key or a bracket


def exceeds(value: object, most: int) -> bool:
    """Whether the texts in `value`, plus a few characters for every other part of it, are longer than `most`.

    It reads a JSON value only as far as needed.
    """
    left = most
    waiting: list[object] = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            left -= len(each)
        elif isinstance(each, Mapping):
            left -= _PER_VALUE * len(each)
            if left >= 0:
                waiting.extend(each.values())
                left -= sum(len(key) for key in each if isinstance(key, str))
        elif isinstance(each, Sequence):
            left -= _PER_VALUE * len(each)
            if left >= 0:
                waiting.extend(each)
        if left < 0:
            return True
    return False


_INTRODUCTION = (
    "You can call functions. To call one, answer with nothing but JSON: "
    '{"name": the function\'s name, "arguments": an object of its arguments}. '
    "For several calls at once, answer with a JSON array of such objects. You will be told the results. "
    "Answer in words where no function fits. The functions:"
)


def describe_tools(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]
) -> list[Mapping[str, object]]:
    """The conversation with the tools described in its system message, and with calls and results as plain messages.

    For models whose chat template has no place for tools.
    """
    text = "\n".join([_INTRODUCTION, *(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)])
    names: dict[object, object] = {}
    plain = [_as_text(message, names) for message in messages]
    first = plain[0] if plain else {}
    content = first.get("content")
    if first.get("role") in ("system", "developer") and isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _as_text(message: Mapping[str, object], names: dict[object, object]) -> Mapping[str, object]:
    """The message with its calls or result as text; `names` collects function names by the ids of their calls."""
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
        shown = spelled_json.write(written[0] if len(written) == 1 else written)
        return {"role": message.get("role"), "content": before + shown}
    if message.get("role") in ("tool", "function"):
        name = message.get("name") or names.get(message.get("tool_call_id")) or "the function"
        return {"role": "user", "content": f"The result of {name}: {_text(message.get('content'))}"}
    return message


def _parsed(arguments: object) -> object:
    """A call's arguments as an object; text that is no JSON as it is. None, and nothing written, are no arguments."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = spelled_json.read(arguments) if arguments.strip() else None
    except (ValueError, RecursionError):
        return arguments
    return {} if parsed is None else parsed


def _text(content: object) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
