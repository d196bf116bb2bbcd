"""The requests of POST /v1/messages and /v1/messages/count_tokens: blocks, tools, messages for the chat template.

Unsupported fields are refused by name; fields without effect are reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from quire_server.answering.options import (
    Conversation,
    GenerationOptions,
    PromptOptions,
    ReplyOptions,
    SamplingOptions,
    StopOptions,
    Structure,
    Tool,
    ToolOptions,
)
from quire_server.dialects import thinking as neutral
from quire_server.dialects.common import (
    FEW_PARTS,
    CacheSalt,
    CacheTtl,
    Int64,
    ModelName,
    SamplingFields,
    Speculates,
    StopStrings,
    Timeout,
    TokenCount,
    WireModel,
    review_extras,
    switch_field,
)
from quire_server.dialects.thinking import ThinkingFields, Wish, check_thinking
from quire_server.dialects.tools import MAX_TOOLS, ToolName, template_tool, tool_options
from quire_server.errors import BadRequest, Unsupported

MAX_MESSAGES = 4096
MAX_BLOCKS = 1024

_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
# Blocks that Anthropic's own tools leave in histories.
_FOREIGN = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "container_upload", "compaction"),
)
_CACHE_CONTROL = "cache_control"
DEFAULT_TTL = "5m"
_TTL_SECONDS = {DEFAULT_TTL: 300.0, "1h": 3600.0}
# Fields of blocks and tools for features that are always on: prefix caching, streaming of arguments.
_NATURAL_OF_PARTS = frozenset({_CACHE_CONTROL, "citations", "caller", "toolset_name", "eager_input_streaming"})

BlockId = Annotated[str, Field(min_length=1, max_length=256)]


def extras_of(model: WireModel) -> list[str]:
    """The names of a block's or a tool's fields without effect. Raises BadRequest for unsupported ones."""
    return review_extras(
        {name: value for name, value in (model.model_extra or {}).items() if name not in _NATURAL_OF_PARTS}
    )


def longest_ttl(controls: Iterable[object]) -> float:
    """The seconds for which the last of the marked prefixes is kept; 0: none is marked. Raises BadRequest."""
    longest = 0.0
    for control in controls:
        ttl = control.get("ttl", DEFAULT_TTL) if isinstance(control, dict) else None
        if (
            not isinstance(control, dict)
            or control.get("type") != "ephemeral"
            or not isinstance(ttl, str)
            or ttl not in _TTL_SECONDS
        ):
            raise BadRequest(
                f"'{_CACHE_CONTROL}' must have the type 'ephemeral', and as 'ttl' '5m' or '1h'.", param=_CACHE_CONTROL
            )
        longest = max(longest, _TTL_SECONDS[ttl])
    return longest


def _kind(value: object) -> str | None:
    """The type of a block, which selects its model. Raises BadRequest for types that are not supported."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    if kind in _FOREIGN:
        return "foreign"
    if kind not in _KINDS:
        raise Unsupported(
            f"Content blocks of type '{kind[:64]}' are not supported; {', '.join(_KINDS)} are.", param="messages"
        )
    return kind


class TextBlock(WireModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(WireModel):
    """Reasoning of an earlier turn, for templates that show it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="not checked: thoughts of any origin may be passed back")


class RedactedThinkingBlock(WireModel):
    """Reasoning that only Anthropic can read; reported as ignored, and not in the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: BlockId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, object]


class ForeignBlock(WireModel):
    """A step of a tool that only Anthropic's servers run; reported as ignored, and not in the prompt."""

    type: str = Field(json_schema_extra={"enum": list(_FOREIGN)})


_BLOCK_ERROR = {
    "custom_error_type": "block_type",
    "custom_error_message": "expected a content block: an object with a 'type'",
}
TextBlocks = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("text")], Discriminator(_kind, **_BLOCK_ERROR)]],
    Field(fail_fast=True, max_length=MAX_BLOCKS),
]


class ToolResultBlock(WireModel):
    """The result of a tool; its tool_use comes before it."""

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: str | TextBlocks | None = None
    is_error: bool | None = Field(None, description="true: the prompt has 'Error: ' before the content")


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ForeignBlock
Blocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("text")]
            | Annotated[ThinkingBlock, Tag("thinking")]
            | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
            | Annotated[ToolUseBlock, Tag("tool_use")]
            | Annotated[ToolResultBlock, Tag("tool_result")]
            | Annotated[ForeignBlock, Tag("foreign")],
            Discriminator(_kind, **_BLOCK_ERROR),
        ]
    ],
    Field(fail_fast=True, max_length=MAX_BLOCKS),
]


class Message(WireModel):
    """A turn, or a part of one: consecutive messages of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> Message:
        for block in self.blocks:
            if block.type not in (*_OF_ROLE[self.role], *_FOREIGN):
                raise ValueError(f"a message of the role '{self.role}' cannot have a block of the type '{block.type}'")
        return self

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)

    def without_effect(self) -> Iterator[str]:
        """The names of fields and blocks that are not in the prompt."""
        yield from extras_of(self)
        for block in self.content if not isinstance(self.content, str) else ():
            if isinstance(block, RedactedThinkingBlock | ForeignBlock):
                yield block.type
            if isinstance(block, ForeignBlock):
                continue
            yield from (f"content.{name}" for name in extras_of(block))
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for part in block.content:
                    yield from (f"content.content.{name}" for name in extras_of(part))


def text_of(content: str | list[TextBlock] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _check_kind(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise Unsupported(
            f"Tools of type '{kind[:64]}' are not supported; only those that the client describes and runs are.",
            param="tools",
        )
    return value


class ToolDefinition(WireModel):
    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    input_schema: dict[str, Any] = Field(description="the JSON schema of its input")
    strict: bool | None = Field(None, description="true: the schema of the input is enforced")

    def neutral(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.input_schema,
            strict=bool(self.strict),
        )

    def for_template(self) -> dict[str, object]:
        return template_tool(self.name, self.description, self.input_schema)


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
    """The tools in the prompt, and the options for calls. Raises BadRequest for an impossible choice.

    The type "none" leaves the tools in the prompt, which begins as in the turns before. The type "auto" needs no
    tools: clients always send it.
    """
    kind = "auto" if choice is None else choice.type
    parallel = choice is None or not choice.disable_parallel_tool_use
    word: Literal["none", "required"] | None = (
        "none" if kind == "none" else "required" if kind in ("any", "tool") else None
    )
    options = tool_options([tool.neutral() for tool in tools], word, parallel=parallel)
    if options is None:
        return (), options
    if choice is not None and choice.type == "tool":
        name = choice.name or ""
        if name not in (tool.name for tool in tools):
            raise BadRequest(f"'tool_choice' names '{name}', which is not in 'tools'.", param="tool_choice")
        options = replace(options, choice="function", function=name)
    return tools, options


# The first line of Claude Code's system prompt. It is for Anthropic's billing and differs in each request: it would
# defeat the prefix cache.
BILLING_LINE = "x-anthropic-billing-header:"

TemplateMessage = dict[str, Any]


def templated(
    system: str | Sequence[TextBlock] | None, messages: Iterable[Message]
) -> tuple[list[TemplateMessage], bool]:
    """The messages for the template, and whether the last one is an assistant's that is to be continued.

    Raises BadRequest for tool results without their tool_use, and for a tool_use at the end, which lacks its result.
    System messages at the beginning are joined to `system`: many templates accept only one, as the first message.
    """
    history = _History()
    history.add_system(_system_texts(system))
    for message in messages:
        if message.role == "system":
            history.add_system([block.text for block in message.blocks if isinstance(block, TextBlock)])
        elif message.role == "user":
            history.add_user(message.blocks)
        else:
            history.add_assistant(message.blocks)
    return history.finish()


def has_billing_line(system: str | Sequence[TextBlock] | None) -> bool:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return any(text.startswith(BILLING_LINE) for text in texts)


def _system_texts(system: str | Sequence[TextBlock] | None) -> list[str]:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return [text.partition("\n")[2] if text.startswith(BILLING_LINE) else text for text in texts]


class _History:
    """The messages so far; consecutive messages of one role are merged.

    Tool results follow the tool_use that they answer, before the user's text beside them.
    """

    def __init__(self) -> None:
        self._messages: list[TemplateMessage] = []
        self._names: dict[str, str] = {}  # tool names by the ids of their uses

    def add_system(self, texts: Iterable[str]) -> None:
        text = "\n\n".join(filter(None, texts))
        if not text:
            return
        if self._is_last("system"):
            self._messages[-1]["content"] += f"\n\n{text}"
        else:
            self._messages.append({"role": "system", "content": text})

    def add_user(self, blocks: Iterable[Block]) -> None:
        """A user's blocks; tool results are messages of their own."""
        texts: list[TextBlock] = []
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                self._add_result(block)
            elif isinstance(block, TextBlock):
                texts.append(block)
        parts = [{"type": "text", "text": block.text} for block in texts]
        if self._is_last("user"):
            self._messages[-1]["content"] += parts
        elif parts:
            self._messages.append({"role": "user", "content": parts})

    def add_assistant(self, blocks: Iterable[Block]) -> None:
        """An assistant's blocks: reasoning, text and tool uses of one turn are one message."""
        turn: TemplateMessage = {"role": "assistant", "content": None}
        goes_on = self._is_last("assistant")
        if goes_on:
            turn = self._messages[-1]
            turn["content"] = turn["content"] and turn["content"] + "\n"
        for block in blocks:
            if isinstance(block, TextBlock):
                turn["content"] = (turn["content"] or "") + block.text
            elif isinstance(block, ThinkingBlock) and block.thinking:
                turn["reasoning"] = f"{turn['reasoning']}\n{block.thinking}" if "reasoning" in turn else block.thinking
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
                self._names[block.id] = block.name
        if not goes_on:
            self._messages.append(turn)

    def finish(self) -> tuple[list[TemplateMessage], bool]:
        if not self._is_last("assistant"):
            return self._messages, False
        last = self._messages[-1]
        if "tool_calls" in last:
            raise BadRequest("The last message uses tools; the next one must have their results.", param="messages")
        if not last["content"] and "reasoning" not in last:  # the turn has no content yet
            return self._messages[:-1], False
        return self._messages, True

    def _add_result(self, block: ToolResultBlock) -> None:
        name = self._names.get(block.tool_use_id)
        if name is None:
            raise BadRequest(
                f"There is no 'tool_use' block with the id '{block.tool_use_id[:96]}' before its 'tool_result'.",
                param="messages",
            )
        text = text_of(block.content)
        if block.is_error:
            text = f"Error: {text}"
        self._messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text})

    def _is_last(self, role: str) -> bool:
        return bool(self._messages) and self._messages[-1]["role"] == role


_UNSUPPORTED = {
    "compaction": "conversations are shortened by the client",
    "container": "only the client runs tools",
    "mcp_servers": "only the client runs tools",
    # The SDKs' own loops expect the server to keep the history; after an error with this code they send all of it.
    "thread": "each request must have the whole conversation",
}
_NATURAL = {_CACHE_CONTROL: None, "service_tier": ("auto", "standard_only"), "speed": ("standard",)}


class Thinking(neutral.Thinking):
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="most tokens of thinking before the answer; the type enabled needs it"
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: the reply has no reasoning; else it is as the model wrote it"
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Thinking:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("the type 'enabled' needs 'budget_tokens'")
        return self


class JsonFormat(WireModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="passed to chat templates that use it"
    )
    format: JsonFormat | None = Field(None, description="the schema of the text")


class CountTokensRequest(ThinkingFields):
    """The fields that make the prompt. Clients of Anthropic may send more of them than a model uses."""

    model: ModelName | None = Field(None, description="a served name; null: the served one")
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), FEW_PARTS]
    system: str | TextBlocks | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Thinking, BeforeValidator(check_thinking)] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="the older name of output_config.format")
    chat_template: str | None = Field(None, description="the name of one of the model's chat templates")
    chat_template_kwargs: dict[str, object] | None = Field(None, description="variables of the chat template")
    cache_salt: CacheSalt | None = Field(None, description="requests with different salts share no cached prefix")
    cache_ttl: CacheTtl | None = Field(None, description="seconds for which the prompt's cached prefix is kept")

    @model_validator(mode="after")
    def _check_unsupported(self) -> CountTokensRequest:
        for name, why in _UNSUPPORTED.items():
            if (self.model_extra or {}).get(name):
                code = "thread_unsupported_request" if name == "thread" else "unsupported_parameter"
                raise BadRequest(f"'{name}' is not supported by this server: {why}.", param=name, code=code)
        return self

    def options(self) -> GenerationOptions:
        """The neutral options. Raises BadRequest for unsupported values."""
        ignored = self._review()
        shown, tools = offered(self.tools or (), self.tool_choice)
        messages, continues = templated(self.system, self.messages)
        return GenerationOptions(
            prompt=PromptOptions(
                source=Conversation(
                    messages=messages,
                    add_generation_prompt=not continues,
                    continue_final_message=continues,
                    template=self.chat_template,
                    template_variables=self.chat_template_kwargs or {},
                    tools=[tool.for_template() for tool in shown],
                ),
                param="messages",
                add_special_tokens=False,  # templates write them
                cache_salt=self.cache_salt or "",
                cache_ttl=self.cache_ttl or longest_ttl(self._cache_controls()),
            ),
            tools=tools,
            structure=self._structure(),
            reasoning=self.reasoning_options(
                self._effort(), show=self.thinking is None or self.thinking.display != "omitted"
            ),
            model=self.model,
            ignored=tuple(dict.fromkeys(ignored)),
        )

    def _cache_controls(self) -> Iterator[object]:
        """Every `cache_control` of the request, wherever it stands."""
        parts: list[WireModel] = [
            self,
            *(self.tools or ()),
            *(() if isinstance(self.system, str) else self.system or ()),
        ]
        for message in self.messages:
            for block in message.content if not isinstance(message.content, str) else ():
                parts.append(block)
                if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                    parts += block.content
        for part in parts:
            if part.model_extra and part.model_extra.get(_CACHE_CONTROL) is not None:
                yield part.model_extra[_CACHE_CONTROL]

    def _structure(self) -> Structure | None:
        wanted, param = self.output_format, "output_format"
        if self.output_config is not None and self.output_config.format is not None:
            wanted, param = self.output_config.format, "output_config.format"
        return None if wanted is None else Structure(kind="json_schema", value=json.dumps(wanted.schema_), param=param)

    def _effort(self) -> Wish:
        """The effort, which is of the whole answer: where thinking is disabled it says nothing of that."""
        given = None if self.output_config is None else self.output_config.effort
        is_off = self.thinking is not None and self.thinking.type == "disabled"
        return Wish(param="output_config.effort", effort=None if is_off else given)

    def _review(self) -> list[str]:
        """The names of fields without effect."""
        extras = {
            name: value
            for name, value in (self.model_extra or {}).items()
            if name not in _UNSUPPORTED and (name not in _NATURAL or value not in (_NATURAL[name] or (value,)))
        }
        ignored = review_extras(extras)
        if has_billing_line(self.system):
            ignored.append(f"system.{BILLING_LINE.rstrip(':')}")
        if self.system is not None and not isinstance(self.system, str):
            ignored += [f"system.{name}" for block in self.system for name in extras_of(block)]
        ignored += [f"messages.{name}" for message in self.messages for name in message.without_effect()]
        ignored += [f"tools.{name}" for tool in self.tools or () for name in extras_of(tool)]
        ignored += self.ignored_thinking_fields()
        for name in ("tool_choice", "output_config"):
            field: WireModel | None = getattr(self, name)
            ignored += [f"{name}.{extra}" for extra in extras_of(field)] if field is not None else []
        return ignored


class MessageRequest(SamplingFields, CountTokensRequest):
    max_tokens: TokenCount = Field(description="0: the prompt is read, for the prefix cache, and no text is generated")
    stream: bool | None = switch_field(False)
    stop_sequences: StopStrings = None

    timeout: Timeout | None = Field(None, description="seconds; unfinished by then, it ends with 504")
    priority: Int64 | None = Field(None, description="lower is earlier, under the priority policy")
    speculation: Speculates = None

    def options(self) -> GenerationOptions:
        return replace(
            super().options(),
            sampling=SamplingOptions(**self.given_numbers()),
            stop=StopOptions(max_tokens=self.max_tokens, strings=tuple(self.stop_sequences or ())),
            reply=ReplyOptions(stream=bool(self.stream)),
            priority=self.priority or 0,
            timeout=self.timeout,
            speculates=self.speculation is not False,
        )
