"""The requests of POST /v1/messages and /v1/messages/count_tokens.

Promises: what Anthropic's clients send validates; what this server cannot do is refused by name, what has no effect is
reported. Must not know: chat templates, the model, how text is generated.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from quire_server.answering.options import (
    Conversation,
    GenerationOptions,
    PromptOptions,
    ReasoningOptions,
    ReplyOptions,
    SamplingOptions,
    StopOptions,
    Structure,
)
from quire_server.errors import BadRequest
from quire_server.wire.common import CacheSalt, Int64, Penalty, Probability, StopStrings, Timeout, TokenCount, WireModel
from quire_server.wire.counted import FEW_PARTS
from quire_server.wire.extras import review_extras
from quire_server.wire.messages.blocks import MAX_MESSAGES, Message, TextBlocks, extras_of
from quire_server.wire.messages.history import BILLING_LINE, has_billing_line, templated
from quire_server.wire.messages.tools import ToolChoice, Tools, offered

_SAMPLING = (
    *("temperature", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_UNSUPPORTED = {
    "compaction": "conversations are shortened by the client",
    "container": "only the client runs tools",
    "mcp_servers": "only the client runs tools",
    # Of the SDKs' own loops, which have the server keep the history; at this error's code they send all of it again.
    "thread": "each request must have the whole conversation",
}
_NATURAL = {"cache_control": None, "service_tier": ("auto", "standard_only"), "speed": ("standard",)}


def _check_thinking(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("enabled", "disabled", "adaptive"):
        raise BadRequest(
            f"Thinking of type '{kind[:64]}' is not supported; 'enabled', 'disabled' and 'adaptive' are.",
            param="thinking",
            code="unsupported_parameter",
        )
    return value


class Thinking(WireModel):
    type: Literal["enabled", "disabled", "adaptive"] = Field(description="adaptive is enabled without a budget")
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="after as many tokens of thinking the answer begins; the type enabled needs it"
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thoughts are not shown; else they are as the model wrote them"
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
    format: JsonFormat | None = Field(None, description="what the text must look like")


class CountTokensRequest(WireModel):
    """What makes a prompt. Anthropic's clients send more fields of it than one model reads; see `options`."""

    model: Annotated[str, Field(max_length=256)] | None = Field(None, description="a served name; null: the served one")
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), FEW_PARTS]
    system: str | TextBlocks | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Thinking, BeforeValidator(_check_thinking)] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="the older name of output_config.format")
    chat_template_kwargs: dict[str, object] | None = Field(None, description="variables of the chat template")
    cache_salt: CacheSalt | None = Field(None, description="requests with different salts share no cached prefix")

    @model_validator(mode="after")
    def _check_unsupported(self) -> CountTokensRequest:
        for name, why in _UNSUPPORTED.items():
            if (self.model_extra or {}).get(name):
                code = "thread_unsupported_request" if name == "thread" else "unsupported_parameter"
                raise BadRequest(f"'{name}' is not supported by this server: {why}.", param=name, code=code)
        return self

    def options(self) -> GenerationOptions:
        """The neutral request. Raises BadRequest for what is not supported."""
        ignored = self._review()
        told, tools = offered(self.tools or (), self.tool_choice)
        messages, continues = templated(self.system, self.messages)
        return GenerationOptions(
            prompt=PromptOptions(
                source=Conversation(
                    messages=messages,
                    add_generation_prompt=not continues,
                    continue_final_message=continues,
                    template_variables=self.chat_template_kwargs or {},
                    tools=[tool.for_template() for tool in told],
                ),
                param="messages",
                add_special_tokens=False,  # templates write them
                cache_salt=self.cache_salt or "",
            ),
            tools=tools,
            structure=self._structure(),
            reasoning=self._reasoning(),
            model=self.model,
            ignored=tuple(dict.fromkeys(ignored)),
        )

    def _structure(self) -> Structure | None:
        wanted, param = self.output_format, "output_format"
        if self.output_config is not None and self.output_config.format is not None:
            wanted, param = self.output_config.format, "output_config.format"
        return None if wanted is None else Structure(kind="json_schema", value=json.dumps(wanted.schema_), param=param)

    def _reasoning(self) -> ReasoningOptions:
        """An effort also where only thinking is asked for: it is what chat templates have switches for."""
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return ReasoningOptions(effort=effort, effort_param="output_config.effort")
        if self.thinking.type == "disabled":
            return ReasoningOptions(effort="none", effort_param="thinking.type")
        return ReasoningOptions(
            effort=effort or "medium",
            effort_param="output_config.effort" if effort else "thinking.type",
            max_tokens=self.thinking.budget_tokens,
            max_tokens_param="thinking.budget_tokens",
            show=self.thinking.display != "omitted",
        )

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
        for name in ("tool_choice", "thinking", "output_config"):
            field: WireModel | None = getattr(self, name)
            ignored += [f"{name}.{extra}" for extra in extras_of(field)] if field is not None else []
        return ignored


class MessageRequest(CountTokensRequest):
    max_tokens: TokenCount = Field(description="0: the prompt is read, for the prefix cache, and nothing is said")
    stream: bool | None = None
    stop_sequences: StopStrings = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="below 1e-5 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="0 and -1 are off")
    min_p: Probability | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    timeout: Timeout | None = Field(None, description="seconds; unfinished by then, it ends with 504")
    priority: Int64 | None = Field(None, description="lower is earlier, under the priority policy")

    def options(self) -> GenerationOptions:
        prompt = super().options()
        return GenerationOptions(
            prompt=prompt.prompt,
            sampling=SamplingOptions(
                **{name: value for name in _SAMPLING if (value := getattr(self, name)) is not None},
                top_k=max(self.top_k or 0, 0),
            ),
            stop=StopOptions(max_tokens=self.max_tokens, strings=tuple(self.stop_sequences or ())),
            reply=ReplyOptions(stream=bool(self.stream)),
            tools=prompt.tools,
            structure=prompt.structure,
            reasoning=prompt.reasoning,
            model=prompt.model,
            priority=self.priority or 0,
            timeout=self.timeout,
            ignored=prompt.ignored,
        )
