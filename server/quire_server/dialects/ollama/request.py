"""The requests of Ollama's /api/chat, /api/generate, /api/embed and /api/show: their fields and its defaults.

Promises: what would change an answer and is not supported is refused; what only concerns loading is taken and reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from quire_server.answering.options import (
    Conversation,
    GenerationOptions,
    Infill,
    PromptOptions,
    ReasoningOptions,
    ReplyOptions,
    SamplingOptions,
    StopOptions,
    Structure,
)
from quire_server.answering.vectors import TextInput, VectorOptions
from quire_server.dialects.common import (
    Int64,
    LogprobCount,
    Penalty,
    Probability,
    RepetitionPenalty,
    StopStrings,
    Temperature,
    TopK,
    TopP,
    WireModel,
    number_field,
    review_extras,
    switch_field,
)
from quire_server.dialects.tools import ToolName, Tools, tool_options
from quire_server.errors import BadRequest, Unsupported

MAX_MESSAGES = 4096
MAX_CALLS = 1024
MAX_INPUTS = 2048
LATEST = ":latest"  # the tag that Ollama's clients put behind a name without one
TemplateMessage = dict[str, Any]

# The neutral names of the numbers that a checkpoint may have defaults for, and those of `options`. The checkpoint's go
# before Ollama's own, as those of a Modelfile do there.
_NUMBERS = {name: name for name in ("temperature", "top_k", "top_p", "min_p")} | {
    "repetition_penalty": "repeat_penalty"
}
# Of `options`: with another value they would change the answer.
_OFF: dict[str, tuple[object, ...]] = {"tfs_z": (1, 1.0), "mirostat": (0,), "typical_p": (1, 1.0)}


def _a_list(value: object) -> object:
    """Null and an empty text are no texts, as in Ollama."""
    if isinstance(value, str):
        return [value] if value else []
    return [] if value is None else value


def _check_format(value: object) -> object:
    if isinstance(value, str) and value not in ("", "json"):
        raise ValueError("must be 'json' or a JSON schema")
    return value


Format = Annotated[
    dict[str, Any] | str | None,
    BeforeValidator(_check_format),
    WithJsonSchema({"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]}),
]
ServedName = Annotated[
    str, Field(min_length=1, max_length=256, description=f"a served name, with or without '{LATEST}'")
]
KeepAlive = Annotated[
    int | float | Annotated[str, Field(max_length=64)] | None,
    Field(description="of several models: seconds, or a duration such as 10m; 0: away when idle; below 0: for ever"),
]
_DURATION = re.compile(r"(-?)((?:\d+(?:\.\d+)?(?:ns|us|µs|ms|h|m|s))+|\d+(?:\.\d+)?)")
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
Think = bool | Literal["low", "medium", "high", "max"] | None


class ModelOptions(WireModel):
    """The field `options`. Those of a load, such as `num_ctx`, have no effect, and are reported."""

    temperature: Temperature | None = number_field("temperature", 0.8)
    top_k: TopK | None = number_field("top_k", 40, "0 is off")
    top_p: TopP | None = number_field("top_p", 0.9)
    min_p: Probability | None = number_field("min_p", 0.0)
    seed: Int64 | None = None
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = Field(None, description="below 0: as many as fit")
    repeat_penalty: RepetitionPenalty | None = number_field("repetition_penalty", 1.0, "over prompt and answer")
    presence_penalty: Penalty | None = number_field("presence_penalty", 0.0, models=False)
    frequency_penalty: Penalty | None = number_field("frequency_penalty", 0.0, models=False)
    stop: StopStrings = None

    def sampling(self, num_logprobs: int | None) -> SamplingOptions:
        """The neutral options."""
        return SamplingOptions(
            given=frozenset(name for name, own in _NUMBERS.items() if getattr(self, own) is not None),
            temperature=0.8 if self.temperature is None else self.temperature,
            top_k=40 if self.top_k is None else max(self.top_k, 0),
            top_p=0.9 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            repetition_penalty=1.0 if self.repeat_penalty is None else self.repeat_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            num_logprobs=num_logprobs,
            logprobs_param="top_logprobs",
        )

    def stopping(self) -> StopOptions:
        """The neutral options. Raises BadRequest."""
        limit = None if self.num_predict is None or self.num_predict < 0 else self.num_predict
        if limit == 0:
            raise BadRequest("'num_predict' must be at least 1, or below 0.", param="options.num_predict")
        return StopOptions(max_tokens=limit, max_tokens_param="options.num_predict", strings=tuple(self.stop or ()))

    def without_effect(self) -> list[str]:
        """The names to report. Raises BadRequest for what would change the answer."""
        extras = dict(self.model_extra or {})
        for name, values in _OFF.items():
            value = extras.pop(name, None)
            if value is not None and value not in values:
                raise Unsupported(f"'{name}' is not supported by this server.", param=f"options.{name}")
        return [f"options.{name}" for name in review_extras(extras)]


class ModelFields(WireModel):
    model: ServedName
    keep_alive: KeepAlive = None

    def kept_seconds(self) -> float | None:
        """How long the model is to stay after its last use, seconds; infinity for ever; None: not said.

        Raises BadRequest.
        """
        if self.keep_alive is None:
            return None
        if isinstance(self.keep_alive, int | float):
            return float("inf") if self.keep_alive < 0 else float(self.keep_alive)
        found = _DURATION.fullmatch(str(self.keep_alive))
        if found is None:
            raise BadRequest(
                "'keep_alive' must be seconds, or a duration such as '10m' or '1h30m'.", param="keep_alive"
            )
        parts = re.findall(r"([\d.]+)([a-zµ]*)", found[2])
        return float("inf") if found[1] else sum(float(number) * _UNIT_SECONDS[unit or "s"] for number, unit in parts)

    def reported(self, options: ModelOptions | None = None) -> list[str]:
        """The names of fields without effect. Raises BadRequest for unsupported ones."""
        names = review_extras(self.model_extra)
        if self.keep_alive is not None and not str(self.keep_alive).startswith("-"):  # below 0 is for ever, as here
            names.append("keep_alive")
        return names + ([] if options is None else options.without_effect())


class _Generation(ModelFields):
    """The common fields of /api/chat and /api/generate."""

    stream: bool | None = switch_field(True, "a line of JSON for each piece of the answer")
    format: Format = Field(None, description="json, or the schema of the answer")
    options: ModelOptions | None = None
    think: Think = Field(None, description="for models that think before they answer")
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = Field(None, description="needs logprobs")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def _options(self, prompt: PromptOptions, model: str, **more: Any) -> GenerationOptions:
        asked = self.options or ModelOptions.model_validate({})
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        return GenerationOptions(
            prompt=prompt,
            model=model,
            sampling=asked.sampling(wanted),
            stop=asked.stopping(),
            reply=ReplyOptions(stream=self.streams, num_logprobs=wanted),
            structure=self._structure(),
            reasoning=self._reasoning(),
            ignored=tuple(dict.fromkeys([*self.reported(asked), *more.pop("ignored", ())])),
            **more,
        )

    def _structure(self) -> Structure | None:
        if not self.format:
            return None
        if isinstance(self.format, str):
            return Structure(kind="json_object", param="format")
        return Structure(kind="json_schema", value=json.dumps(self.format), param="format")

    def _reasoning(self) -> ReasoningOptions:
        if self.think is None:
            return ReasoningOptions()
        if self.think is False:
            return ReasoningOptions(effort="none", effort_param="think")
        return ReasoningOptions(effort="medium" if self.think is True else self.think, effort_param="think")


class CalledFunction(WireModel):
    name: ToolName
    arguments: dict[str, Any] | None = None
    index: int | None = None


class ToolCall(WireModel):
    function: CalledFunction
    id: Annotated[str, Field(max_length=256)] | None = None


class Message(WireModel):
    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_. -]{1,64}$")] = Field(
        description="system, user, assistant, tool, or another that the chat template knows"
    )
    content: str | None = None
    thinking: str | None = Field(None, description="of an assistant's earlier answer; for templates that use it")
    images: list[str] | None = Field(None, description="not supported")
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = Field(None, description="of a tool's result")
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class ChatRequest(_Generation):
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = Field(
        None, description="none: the model is loaded, as it is already"
    )
    tools: Tools | None = None

    def neutral(self, model: str) -> GenerationOptions:
        """The neutral options; `model` as the server names it. Raises BadRequest for unsupported values."""
        messages = _templated(self.messages or ())
        continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        prompt = PromptOptions(
            source=Conversation(
                messages=messages,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                tools=tuple(tool.for_template() for tool in self.tools or ()),
            ),
            param="messages",
            add_special_tokens=False,  # templates write them
        )
        tools = tool_options([tool.neutral() for tool in self.tools or ()], None, parallel=None)
        ignored = [f"messages.{name}" for each in self.messages or () for name in review_extras(each.model_extra)]
        return self._options(prompt, model, tools=tools, ignored=ignored)


class GenerateRequest(_Generation):
    prompt: str | None = Field(None, description="none: the model is loaded, as it is already")
    suffix: str | None = Field(None, description="the text after the middle, for models that can write it")
    system: str | None = None
    raw: bool | None = Field(None, description="true: the prompt is the text itself, without the chat template")
    template: str | None = Field(None, description="not supported")
    context: list[int] | None = Field(None, description="not supported")
    images: list[str] | None = Field(None, description="not supported")

    def neutral(self, model: str, *, has_template: bool) -> GenerationOptions:
        """Return the neutral options; without a chat template the prompt is the text itself. Raises BadRequest."""
        if self.template:
            raise Unsupported(
                "Requests cannot bring templates; the operator sets one with --chat-template.", param="template"
            )
        if self.context:
            raise Unsupported("'context' is not supported: send the conversation to /api/chat.", param="context")
        _refuse_images(self.images, "images")
        prompt = self.prompt or ""
        if self.suffix:
            return self._options(
                PromptOptions(source=[prompt], param="prompt", infill=Infill(suffix=self.suffix)), model
            )
        if self.raw or not has_template:
            if self.system:
                raise Unsupported("'system' needs a chat template, and is not for 'raw' prompts.", param="system")
            return self._options(PromptOptions(source=[prompt], param="prompt"), model)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        source = Conversation(messages=[*messages, {"role": "user", "content": prompt}])
        return self._options(PromptOptions(source=source, param="prompt", add_special_tokens=False), model)


class EmbedRequest(ModelFields):
    input: Annotated[
        Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)],
        BeforeValidator(_a_list),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "maxItems": MAX_INPUTS},
                    {"type": "null"},
                ]
            }
        ),
    ] = Field([], description="none: the reply has no embeddings")
    truncate: bool | None = Field(None, description="false: a text longer than the context is refused, not cut")
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    options: ModelOptions | None = Field(None, description="without effect")

    def neutral(self, model: str) -> VectorOptions:
        """The neutral options."""
        return _vectors(self, self.input, "input", model, self.dimensions, cuts=self.truncate is not False)


class EmbeddingsRequest(ModelFields):
    """The older form of /api/embed, with one text."""

    prompt: str
    options: ModelOptions | None = Field(None, description="without effect")

    def neutral(self, model: str) -> VectorOptions:
        """The neutral options."""
        return _vectors(self, [self.prompt], "prompt", model, None, cuts=True)


class ShowRequest(WireModel):
    model: ServedName | None = None
    name: ServedName | None = Field(None, description="the older name of model; one of both is needed")
    verbose: bool | None = Field(None, description="without effect")

    @model_validator(mode="after")
    def _check_name(self) -> ShowRequest:
        if not self.asked:
            raise ValueError("'model' is needed")
        return self

    @property
    def asked(self) -> str:
        return self.model or self.name or ""


def _vectors(
    fields: EmbedRequest | EmbeddingsRequest,
    texts: Sequence[str],
    param: str,
    model: str,
    dimensions: int | None,
    *,
    cuts: bool,
) -> VectorOptions:
    names = [param] if len(texts) == 1 else [f"{param}[{i}]" for i in range(len(texts))]
    return VectorOptions(
        inputs=[TextInput(source=text, param=name) for text, name in zip(texts, names, strict=True)],
        model=model,
        keep_tokens=-1 if cuts else None,
        dimensions=dimensions,
        normalize=True,
        ignored=tuple(fields.reported() + (["options"] if fields.options is not None else [])),
    )


def _templated(messages: Sequence[Message]) -> list[TemplateMessage]:
    """The messages in the form that templates expect. Results of tools get the ids of the calls that they answer."""
    shown: list[TemplateMessage] = []
    open_calls: list[tuple[str, str]] = []  # (id, name) of calls without a result, in their order
    for message in messages:
        _refuse_images(message.images, "messages")
        turn: TemplateMessage = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning"] = message.thinking
        if message.tool_calls:
            calls = []
            for number, call in enumerate(message.tool_calls):
                call_id = call.id or f"call_{len(shown)}_{number}"
                open_calls.append((call_id, call.function.name))
                arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            turn["tool_calls"] = calls
        if message.role == "tool":
            answered = _answered(message, open_calls)
            if answered is not None:
                open_calls.remove(answered)
                turn["tool_call_id"], turn["name"] = answered
            elif message.tool_name:
                turn["name"] = message.tool_name
        shown.append(turn)
    return shown


def _answered(message: Message, open_calls: list[tuple[str, str]]) -> tuple[str, str] | None:
    """The call that a result answers: the one that it names, else the first without a result."""
    for call in open_calls:
        if message.tool_call_id == call[0] or (not message.tool_call_id and message.tool_name in (call[1], None, "")):
            return call
    return None


def _refuse_images(images: list[str] | None, param: str) -> None:
    if images:
        raise Unsupported("Images are not supported; this server reads text only.", param=param)
