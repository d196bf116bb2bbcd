"""The wire models of POST /v1/chat/completions: the request, the reply and the chunks of a streamed reply.

Messages are text only; the chat template decides on roles and their order.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quire_server.answering.options import Conversation, GenerationOptions, ToolOptions
from quire_server.dialects.common import (
    FEW_PARTS,
    CompletionHead,
    FinishedBecause,
    LogprobCount,
    PromptLogprobs,
    PromptProgress,
    ReplyModel,
    Timings,
    TokenLimit,
    TokenLogprob,
    UsageInfo,
    WireModel,
    bounded,
    review_extras,
)
from quire_server.dialects.options import generation_options, review
from quire_server.dialects.structure import StructuredFields
from quire_server.dialects.thinking import ThinkingFields
from quire_server.dialects.tools import ToolChoice, ToolDefinition, Tools, tool_options
from quire_server.errors import BadRequest, Unsupported

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PREDICTED_CHARS = 1 << 20
_NEED_CONTENT = frozenset({"system", "developer", "user", "tool"})


class TextPart(WireModel):
    type: Annotated[str, Field(max_length=64)] = Field(description="text; nothing else is supported")
    text: str | None = None

    @model_validator(mode="after")
    def _check_text(self) -> TextPart:
        if self.type != "text":
            raise Unsupported(
                f"Content parts of type '{self.type}' are not supported; only 'text' is.", param="messages"
            )
        if self.text is None:
            raise ValueError("a text part needs a text")
        return self


class Prediction(WireModel):
    """The client's guess of the answer, as where a file is written anew with few changes."""

    type: Literal["content"]
    content: (
        Annotated[str, Field(max_length=MAX_PREDICTED_CHARS)]
        | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
    )

    def text(self) -> str:
        """The whole text, cut to the length of the longest."""
        parts = [self.content] if isinstance(self.content, str) else [part.text or "" for part in self.content]
        return "".join(parts)[:MAX_PREDICTED_CHARS]


class Message(WireModel):
    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_. -]{1,64}$")] = Field(
        description="system, developer, user, assistant, tool, function, or another that the chat template knows"
    )
    content: str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)] | None = Field(
        None, description="needed from all but an assistant, a function and roles of the template's own"
    )
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning: str | None = Field(None, description="of an assistant's earlier answer; for templates that use it")
    reasoning_content: str | None = Field(None, description="the older name of reasoning")

    tool_calls: Annotated[list[dict[str, object]], Field(fail_fast=True, max_length=MAX_PARTS)] | None = Field(
        None, description="of an assistant's earlier answer; for templates that show them"
    )
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    function_call: dict[str, object] | None = Field(None, description="the older form of tool_calls")

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role in _NEED_CONTENT:
            raise ValueError(f"a message of the role '{self.role}' needs a content")
        if (self.model_extra or {}).get("audio") is not None:
            raise Unsupported("Messages with 'audio' are not supported.", param="messages")
        return self

    def said(self) -> str:
        """The text of an assistant's message; empty for others."""
        if self.role != "assistant" or self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)

    def for_template(self) -> dict[str, object]:
        """The message in the form that templates expect."""
        content: object = self.content
        if isinstance(self.content, list):
            content = [{"type": "text", "text": part.text} for part in self.content]
        message: dict[str, object] = {"role": self.role, "content": content}
        for name in ("name", "tool_calls", "tool_call_id", "function_call"):
            if value := getattr(self, name):
                message[name] = value
        reasoning = self.reasoning if self.reasoning is not None else self.reasoning_content
        if reasoning is not None:
            message["reasoning"] = reasoning
        return message


class ChatCompletionRequest(StructuredFields, ThinkingFields):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), FEW_PARTS]
    max_completion_tokens: TokenLimit | None = Field(None, description="takes precedence over max_tokens")
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = Field(None, description="needs logprobs")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="the name of one of the model's chat templates")
    chat_template_kwargs: dict[str, object] | None = Field(None, description="variables of the chat template")
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in a reply")
    echo: bool | None = Field(None, description="true: the reply begins with the last message, if it is an assistant's")
    prediction: Prediction | None = Field(None, description="a guess of the answer; no answer changes")
    documents: Annotated[list[dict[str, object]], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="texts to answer from, for chat templates that show them"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs and self.top_logprobs > 0:
            raise BadRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                param="continue_final_message",
            )
        return self

    def options(self) -> GenerationOptions:
        """The neutral options. Raises BadRequest for unsupported values."""
        ignored = review(self) + self.ignored_thinking_fields()
        for message in self.messages:
            ignored += [f"messages.{name}" for name in review_extras(message.model_extra)]
        has_new_name = self.max_completion_tokens is not None
        max_tokens = self.max_completion_tokens if has_new_name else self.max_tokens
        max_tokens_param = "max_completion_tokens" if has_new_name else "max_tokens"
        if max_tokens == 0:
            raise BadRequest(f"'{max_tokens_param}' must be at least 1.", param=max_tokens_param)
        continues = bool(self.continue_final_message)
        tools = tool_options(
            [tool.neutral() for tool in self.tools or ()], self.tool_choice, parallel=self.parallel_tool_calls
        )
        if tools is None and self.parallel_tool_calls is False:
            ignored.append("parallel_tool_calls")
        return generation_options(
            self,
            source=Conversation(
                messages=[message.for_template() for message in self.messages],
                add_generation_prompt=not continues
                if self.add_generation_prompt is None
                else self.add_generation_prompt,
                continue_final_message=continues,
                template=self.chat_template,
                template_variables=(self.chat_template_kwargs or {})
                | ({"documents": self.documents} if self.documents else {}),
                tools=tuple(tool.for_template() for tool in self._shown_tools(tools)),
            ),
            reasoning=self.reasoning_options(),
            beam=self.beam_options(),
            tools=tools,
            source_param="messages",
            add_special_tokens=bool(self.add_special_tokens),  # templates write them
            max_tokens=bounded(max_tokens),
            max_tokens_param=max_tokens_param,
            default_max_tokens=None,
            num_logprobs=0 if self.logprob_token_ids else (self.top_logprobs or 0) if self.logprobs else None,
            num_prompt_logprobs=self.prompt_logprobs,
            logprobs_param="top_logprobs",
            echo=False,
            begins_with=self.messages[-1].said() if self.echo else "",
            prediction="" if self.prediction is None else self.prediction.text(),
            ignored=ignored,
        )

    def _shown_tools(self, options: ToolOptions | None) -> list[ToolDefinition]:
        """The tools in the prompt, also where no call is allowed: the prompt begins as in the turns before."""
        if options is None:
            return []
        names = {tool.name for tool in options.tools}
        return [tool for tool in self.tools or () if tool.function is not None and tool.function.name in names]


class ChatLogprobs(ReplyModel):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(ReplyModel):
    name: str
    arguments: str = Field(description="JSON")


class ToolCall(ReplyModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ReplyModel):
    role: Literal["assistant"]
    content: str | None = Field(description="null where there are only calls")
    refusal: None
    annotations: None
    audio: None
    function_call: None
    tool_calls: list[ToolCall] | None
    reasoning: str | None = Field(None, description="the model's reasoning, if there is any")
    reasoning_content: str | None = Field(None, description="the same under its older name")


class ChatChoice(ReplyModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBecause
    stop_reason: str | int | None = Field(description="the matched stop string or token id; null otherwise")
    token_ids: list[int] | None = Field(description="null without return_token_ids")
    beam_score: float | None = Field(
        None, description="the score of a beam search hypothesis, by which choices are ranked"
    )


class ChatCompletionResponse(CompletionHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    service_tier: None
    prompt_logprobs: PromptLogprobs | None = Field(description="null without prompt_logprobs in the request")
    prompt_token_ids: list[int] | None = Field(description="null without return_token_ids")
    usage: UsageInfo
    timings: Timings | None = None


class FunctionDelta(ReplyModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ReplyModel):
    index: int
    id: str | None = Field(None, description="in the first piece of a call, with its name")
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(ReplyModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ReplyModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBecause | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    beam_score: float | None = Field(
        None, description="the score of a beam search hypothesis, by which choices are ranked"
    )


class ChatCompletionChunk(CompletionHead):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None
    prompt_token_ids: list[int] | None = None
