"""The request of POST /v1/responses: text formats, fields without effect, messages for the chat template.

A field at OpenAI's default is never an error; fields without effect are reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from quire_server.answering.options import (
    Conversation,
    GenerationOptions,
    PromptOptions,
    ReplyOptions,
    SamplingOptions,
    StopOptions,
    Structure,
)
from quire_server.dialects import thinking as neutral
from quire_server.dialects.common import (
    BATCH_TIER,
    FEW_PARTS,
    DecodingFields,
    LogprobCount,
    ServingFields,
    TokenLimit,
    WireModel,
    bounded,
    review_extras,
    switch_field,
)
from quire_server.dialects.responses.items import (
    ContentItem,
    CustomCallItem,
    CustomOutputItem,
    ForeignItem,
    FunctionCallItem,
    FunctionOutputItem,
    ItemReference,
    Items,
    MessageItem,
    ReasoningItem,
    text_of,
)
from quire_server.dialects.responses.tools import (
    Choice,
    Offered,
    Tools,
    all_offered,
    flat_name,
    input_arguments,
    offered,
)
from quire_server.dialects.thinking import ThinkingFields
from quire_server.errors import BadRequest, Unsupported


class PlainText(WireModel):
    type: Literal["text"] = "text"


class JsonObject(WireModel):
    type: Literal["json_object"]


class JsonSchema(WireModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="without effect: the text always follows the schema")


Format = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class TextOptions(WireModel):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="without effect, and reported")

    def shown(self) -> dict[str, object]:
        """The field as the reply repeats it."""
        wanted = self.format or PlainText(type="text")
        if not isinstance(wanted, JsonSchema):
            return {"format": {"type": wanted.type}, "verbosity": self.verbosity or "medium"}
        schema = {
            "type": wanted.type,
            "name": wanted.name,
            "description": wanted.description,
            "schema": wanted.schema_,
            "strict": bool(wanted.strict),
        }
        return {"format": schema, "verbosity": self.verbosity or "medium"}

    def without_effect(self) -> list[str]:
        extras = {"verbosity": self.verbosity, **(self.model_extra or {})}
        return review_extras(extras)


# Unsupported fields, with the values that turn them off and a hint.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "background": ((None, False), "a response is made while its client waits"),
    "context_management": ((None, []), "histories are not compacted; see 'truncation'"),
    "conversation": ((None,), "use 'previous_response_id'"),
    "moderation": ((None,), "nothing is moderated"),
    "prompt": ((None,), "there are no stored prompts; use 'input' and 'instructions'"),
}
# Fields by their names in other dialects: as unknown names they would be ignored although they change the text.
_RENAMED: Mapping[str, str] = {
    "functions": "tools",
    "guided_json": "text.format",
    "guided_regex": "text.format",
    "guided_choice": "text.format",
    "guided_grammar": "text.format",
    "guided_json_object": "text.format",
    "logprobs": "include: ['message.output_text.logprobs']",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "structured_outputs": "text.format",
}

INCLUDE_LOGPROBS = "message.output_text.logprobs"


def review(extras: Mapping[str, object] | None) -> list[str]:
    """The names of fields without effect, to be reported. Raises BadRequest for what is not supported."""
    others = dict(extras or {})
    for name, (off_values, reason) in _REFUSED.items():
        if name in others and not any(others[name] is value or others[name] == value for value in off_values):
            raise Unsupported(f"'{name}' is not supported by this server: {reason}.", param=name)
        others.pop(name, None)
    for name, ours in _RENAMED.items():
        if others.get(name) is not None:
            raise Unsupported(f"'{name}' is not a field of responses; use '{ours}'.", param=name)
        others.pop(name, None)
    if others.get("n") not in (None, 1):
        raise Unsupported("A response has one answer: 'n' can only be 1.", param="n")
    others.pop("n", None)
    return review_extras(others)


def review_includes(include: Iterable[str] | None) -> list[str]:
    """The names in `include` without effect."""
    return [f"include.{name}" for name in include or () if name != INCLUDE_LOGPROBS]


Message = dict[str, object]


def messages(instructions: str | None, items: Iterable[ContentItem]) -> list[Message]:
    """The messages for the template, instructions first. Raises BadRequest for an output without its call.

    System and developer messages at the beginning are joined to the instructions: many templates accept a system
    message only as the first one.
    """
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    at_head = bool(instructions)
    for item in items:
        if at_head and isinstance(item, MessageItem) and item.role in ("system", "developer"):
            head = conversation.messages[0]
            head["content"] = f"{head['content']}\n\n{text_of(item.content)}"
            continue
        at_head = False
        conversation.add(item)
    return conversation.messages


class _Conversation:
    """The messages so far; the last one may be an assistant's turn to which more items belong.

    Reasoning, text and calls of one turn are one message; an output follows the call that it answers.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None
        self._names: dict[str, str] = {}  # function names by the ids of their calls

    def add(self, item: ContentItem) -> None:
        match item:
            case ReasoningItem():
                self._add_reasoning(item.text)
            case MessageItem(role="assistant"):
                self._add_text(text_of(item.content))
            case FunctionCallItem():
                self._add_call(item.call_id, flat_name(item.namespace, item.name), item.arguments)
            case CustomCallItem():
                self._add_call(item.call_id, flat_name(item.namespace, item.name), input_arguments(item.input))
            case FunctionOutputItem() | CustomOutputItem():
                self._add_output(item)
            case _:
                self._turn = None
                content: object = item.content
                if not isinstance(item.content, str):
                    content = [{"type": "text", "text": part.content} for part in item.content]
                self.messages.append({"role": item.role, "content": content})

    def _open(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn

    def _add_reasoning(self, text: str) -> None:
        if self._turn is not None and (self._turn["content"] is not None or "tool_calls" in self._turn):
            self._turn = None  # reasoning begins a turn
        turn = self._open()
        if text:
            turn["reasoning"] = f"{turn['reasoning']}\n{text}" if "reasoning" in turn else text

    def _add_text(self, text: str) -> None:
        if self._turn is not None and self._turn["content"] is not None and "tool_calls" not in self._turn:
            self._turn = None  # two messages of an assistant are two turns
        turn = self._open()
        # Text after a call stays in the call's turn: the call's output is expected right after that.
        turn["content"] = text if turn["content"] is None else f"{turn['content']}\n{text}"

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        calls = self._open().setdefault("tool_calls", [])
        assert isinstance(calls, list)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name

    def _add_output(self, item: FunctionOutputItem | CustomOutputItem) -> None:
        name = self._names.get(item.call_id)
        if name is None:
            raise BadRequest(
                f"There is no call with the call_id '{item.call_id[:96]}' before its output.", param="input"
            )
        self._turn = None
        self.messages.append(
            {"role": "tool", "tool_call_id": item.call_id, "name": name, "content": text_of(item.output)}
        )


MAX_METADATA = 16
MAX_INCLUDES = 32
_NO_SPECIAL_TOKENS = False  # templates write them


class Reasoning(neutral.Reasoning):
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="without effect: reasoning is shown as it is, without a summary"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="as summary")


def _as_items(value: object) -> object:
    """A string becomes one user message."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


class ResponseRequest(DecodingFields, ServingFields, ThinkingFields):
    input: Annotated[Items, FEW_PARTS, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    instructions: str | None = Field(None, description="a system message before all others, for this response only")
    previous_response_id: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="a stored response that this one continues"
    )
    tools: Tools | None = Field(
        None,
        description="functions, namespaces of them, custom tools; web_search with external_web_access has no effect",
    )
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the beginning of a conversation that is too long is cut off"
    )
    chat_template: str | None = Field(None, description="the name of one of the model's chat templates")
    chat_template_kwargs: dict[str, object] | None = Field(None, description="variables of the chat template")

    max_output_tokens: TokenLimit | None = Field(None, description="thoughts included; -1: no limit")
    top_logprobs: LogprobCount | None = Field(None, description=f"needs {INCLUDE_LOGPROBS} in include")
    include: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=MAX_INCLUDES)] | None = Field(
        None, description=f"{INCLUDE_LOGPROBS}; others are without effect, and reported"
    )
    stream: bool | None = switch_field(False)
    stream_options: dict[str, object] | None = Field(None, description="include_obfuscation is without effect")
    store: bool | None = switch_field(True, "false: the response cannot be read or continued later")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(
        None, description="without effect: it limits built-in tools, of which there are none"
    )
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ResponseRequest:
        if self.top_logprobs and not self._shows_logprobs:
            raise BadRequest(f"'top_logprobs' needs 'include': ['{INCLUDE_LOGPROBS}'].", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("'stream_options' needs 'stream': true.", param="stream_options")
        return self

    @property
    def _shows_logprobs(self) -> bool:
        return INCLUDE_LOGPROBS in (self.include or ())

    def shown(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        """The request's fields that the reply repeats, with the defaults that were used: `defaults`, else OpenAI's."""
        text = self.text or TextOptions.model_validate({})
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": bounded(self.max_output_tokens),
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning_options().effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": BATCH_TIER if self.service_tier == BATCH_TIER else "default",
            "temperature": defaults.get("temperature", 1.0) if self.temperature is None else self.temperature,
            "text": text.shown(),
            "tool_choice": "auto"
            if self.tool_choice is None
            else self.tool_choice
            if isinstance(self.tool_choice, str)
            else self.tool_choice.model_dump(exclude_none=True),
            "tools": [tool.shown() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": defaults.get("top_p", 1.0) if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }

    @property
    def own_items(self) -> list[ContentItem | ItemReference]:
        """The input without what is passed over."""
        return [item for item in self.input if not isinstance(item, ForeignItem)]

    def offered(self) -> dict[str, Offered]:
        """The tools by the names that the model knows them by. Raises BadRequest for two of one name."""
        return all_offered(self.tools or ())

    def options(self, items: Sequence[ContentItem]) -> GenerationOptions:
        """The neutral options for these items, with references resolved. Raises BadRequest for unsupported values."""
        ignored = self._review(items)
        if self.max_output_tokens == 0:
            raise BadRequest("'max_output_tokens' must be at least 1, or -1.", param="max_output_tokens")
        num_logprobs = (self.top_logprobs or 0) if self._shows_logprobs else None
        shown, tools = offered(self.offered(), self.tool_choice, parallel=self.parallel_tool_calls)
        conversation = messages(self.instructions, items)
        if not conversation:
            raise BadRequest("'input' must have at least one item, or 'instructions' a text.", param="input")
        return GenerationOptions(
            prompt=PromptOptions(
                source=Conversation(
                    messages=conversation,
                    template=self.chat_template,
                    template_variables=self.chat_template_kwargs or {},
                    tools=[tool.for_template() for tool in shown],
                ),
                param="input",
                add_special_tokens=_NO_SPECIAL_TOKENS,
                keep_tokens=-1 if self.truncation == "auto" else None,
                cache_salt=self.cache_salt or "",
                cache_ttl=self.cache_ttl or 0.0,
            ),
            sampling=SamplingOptions(
                **self.given_numbers(),
                logit_bias=tuple((int(key), value) for key, value in (self.logit_bias or {}).items()),
                num_logprobs=num_logprobs,
                logprobs_param="top_logprobs",
            ),
            stop=StopOptions(
                max_tokens=bounded(self.max_output_tokens),
                max_tokens_param="max_output_tokens",
                min_tokens=self.min_tokens or 0,
                strings=tuple(self.stop or ()),
                token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
            ),
            reply=ReplyOptions(stream=bool(self.stream), num_logprobs=num_logprobs),
            tools=tools,
            structure=self._structure(),
            reasoning=self.reasoning_options(),
            model=self.model,
            priority=self.priority or 0,
            timeout=self.timeout,
            is_batch=self.service_tier == BATCH_TIER,
            speculates=self.speculation is not False,
            ignored=tuple(dict.fromkeys(ignored)),
        )

    def _structure(self) -> Structure | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return Structure(kind="json_object", param="text.format")
        return Structure(kind="json_schema", value=json.dumps(wanted.schema_), param="text.format")

    def _review(self, items: Sequence[ContentItem]) -> list[str]:
        """The names of fields without effect."""
        others: dict[str, object] = {name: getattr(self, name) for name in ("user", "safety_identifier")}
        others |= {name: getattr(self, name) for name in ("prompt_cache_key", "service_tier", "max_tool_calls")}
        ignored = review(others | (self.model_extra or {}))
        ignored += review_includes(self.include)
        ignored += [f"stream_options.{name}" for name in review_extras(self.stream_options)]
        if self.reasoning is not None:
            both = {"summary": self.reasoning.summary, "generate_summary": self.reasoning.generate_summary}
            ignored += [f"reasoning.{name}" for name in review_extras(both)]
        ignored += self.ignored_thinking_fields()
        if not self.reasoning_options().show:  # the reply has an item for them all the same
            ignored.append("reasoning.exclude" if self.include_reasoning is not False else "include_reasoning")
        if self.text is not None:
            ignored += [f"text.{name}" for name in self.text.without_effect()]
        for tool in self.tools or ():
            ignored += [f"tools.{name}" for name in tool.without_effect()]
        ignored += [f"input.{item.type}" for item in self.input if isinstance(item, ForeignItem)]
        for item in items:
            names = review_extras(item.model_extra)
            if isinstance(item, MessageItem) and not isinstance(item.content, str):
                names += [f"content.{name}" for part in item.content for name in review_extras(part.model_extra)]
            ignored += [f"input.{name}" for name in names]
        return ignored
