"""The wire model of POST /v1/responses, what of it its reply repeats, and the neutral request that it makes.

Promises: a field at OpenAI's default is never an error; what is without effect is reported. Must not know: the store
(the route brings the items of earlier responses), the model, how text is generated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

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
from quire_server.wire.common import (
    MAX_BIASED_TOKENS,
    CacheSalt,
    Int64,
    LogitBias,
    LogprobCount,
    Penalty,
    Probability,
    StopStrings,
    Timeout,
    TokenCount,
    TokenIds,
    WireModel,
)
from quire_server.wire.counted import FEW_PARTS
from quire_server.wire.extras import BATCH_TIER, review_extras
from quire_server.wire.responses.extras import INCLUDE_LOGPROBS, review, review_includes
from quire_server.wire.responses.history import messages
from quire_server.wire.responses.items import ContentItem, Items, MessageItem
from quire_server.wire.responses.text import TextOptions
from quire_server.wire.responses.tools import Choice, Tools, offered

MAX_METADATA = 16
MAX_INCLUDES = 32
_NO_SPECIAL_TOKENS = False  # templates write them

# Fields of the request and of the neutral request's sampling that have the same name, meaning and default.
_SAMPLING = (
    *("temperature", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class Reasoning(WireModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="passed to chat templates that use it"
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="without effect: thoughts are shown as they are, not summed up"
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="as summary")


def _as_items(value: object) -> object:
    """A text is one message of the user's."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


class ResponseRequest(WireModel):
    model: Annotated[str, Field(max_length=256)] | None = Field(None, description="a served name; null: the served one")
    input: Annotated[Items, FEW_PARTS, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    instructions: str | None = Field(None, description="a system message before all others, for this response only")
    previous_response_id: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="a stored response that this one goes on from"
    )
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: of a conversation that is too long, the beginning is cut off"
    )
    chat_template_kwargs: dict[str, object] | None = Field(None, description="variables of the chat template")

    max_output_tokens: Annotated[TokenCount, Field(ge=1)] | None = Field(None, description="thoughts included")
    max_reasoning_tokens: TokenCount | None = Field(None, description="after as many thinking is ended")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="below 1e-5 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: LogprobCount | None = Field(None, description=f"needs {INCLUDE_LOGPROBS} in include")
    include: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=MAX_INCLUDES)] | None = Field(
        None, description=f"{INCLUDE_LOGPROBS}; others are without effect, and reported"
    )
    stream: bool | None = None
    stream_options: dict[str, object] | None = Field(None, description="include_obfuscation is without effect")
    store: bool | None = Field(None, description="false: the response cannot be read or continued later")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(None, description="of built-in tools; there are none")
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="0 and -1 are off")
    min_p: Probability | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias = None
    stop: StopStrings = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_BIASED_TOKENS)] | None = None
    min_tokens: TokenCount | None = None
    ignore_eos: bool | None = None
    timeout: Timeout | None = Field(None, description="seconds; unfinished by then, it ends with 504")
    priority: Int64 | None = Field(None, description="lower is earlier, under the priority policy")
    cache_salt: CacheSalt | None = Field(None, description="requests with different salts share no cached prefix")

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

    @property
    def _effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def shown(self) -> dict[str, Any]:
        """What the reply repeats of the request, with the defaults that were used."""
        text = self.text or TextOptions.model_validate({})
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self._effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": BATCH_TIER if self.service_tier == BATCH_TIER else "default",
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": text.shown(),
            "tool_choice": "auto"
            if self.tool_choice is None
            else self.tool_choice
            if isinstance(self.tool_choice, str)
            else self.tool_choice.model_dump(),
            "tools": [tool.shown() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }

    def options(self, items: Sequence[ContentItem]) -> GenerationOptions:
        """The neutral request for these items, all references resolved. Raises BadRequest for what is not supported."""
        ignored = self._review(items)
        num_logprobs = (self.top_logprobs or 0) if self._shows_logprobs else None
        seen, tools = offered(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls)
        conversation = messages(self.instructions, items)
        if not conversation:
            raise BadRequest("'input' must have at least one item, or 'instructions' a text.", param="input")
        return GenerationOptions(
            prompt=PromptOptions(
                source=Conversation(
                    messages=conversation,
                    template_variables=self.chat_template_kwargs or {},
                    tools=[tool.for_template() for tool in seen],
                ),
                param="input",
                add_special_tokens=_NO_SPECIAL_TOKENS,
                keep_tokens=-1 if self.truncation == "auto" else None,
                cache_salt=self.cache_salt or "",
            ),
            sampling=SamplingOptions(
                **{name: value for name in _SAMPLING if (value := getattr(self, name)) is not None},
                top_k=max(self.top_k or 0, 0),
                logit_bias=tuple((int(key), value) for key, value in (self.logit_bias or {}).items()),
                num_logprobs=num_logprobs,
            ),
            stop=StopOptions(
                max_tokens=self.max_output_tokens,
                max_tokens_param="max_output_tokens",
                min_tokens=self.min_tokens or 0,
                strings=tuple(self.stop or ()),
                token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
            ),
            reply=ReplyOptions(stream=bool(self.stream), num_logprobs=num_logprobs),
            tools=tools,
            structure=self._structure(),
            reasoning=ReasoningOptions(effort=self._effort, max_tokens=self.max_reasoning_tokens),
            model=self.model,
            priority=self.priority or 0,
            timeout=self.timeout,
            is_batch=self.service_tier == BATCH_TIER,
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
            ignored += [f"reasoning.{name}" for name in review_extras(both | (self.reasoning.model_extra or {}))]
        if self.text is not None:
            ignored += [f"text.{name}" for name in self.text.without_effect()]
        for tool in self.tools or ():
            ignored += [f"tools.{name}" for name in review_extras(tool.model_extra)]
        for item in items:
            names = review_extras(item.model_extra)
            if isinstance(item, MessageItem) and not isinstance(item.content, str):
                names += [f"content.{name}" for part in item.content for name in review_extras(part.model_extra)]
            ignored += [f"input.{name}" for name in names]
        return ignored
