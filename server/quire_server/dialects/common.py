"""Shared parts of the dialects: request fields with their bounds, reply models, fields without effect.

Null always means "not given".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from quire_engine.contract.types import MAX_LOGPROBS
from quire_server.errors import Unsupported

MAX_PARTS_IN_ALL = 8192
_MOST_MESSAGES = 4096  # longer lists are refused by their field


def _check_parts(messages: object) -> object:
    """Refuse too many content parts in all messages together, before any of them is validated."""
    if isinstance(messages, list) and len(messages) <= _MOST_MESSAGES:
        num_parts = 0
        for content in _contents(messages):
            num_parts += len(content)
            if num_parts > MAX_PARTS_IN_ALL:
                raise ValueError(f"at most {MAX_PARTS_IN_ALL} content parts in all messages")
    return messages


def _contents(messages: list[object]) -> Iterator[list[object]]:
    """The lists of parts in messages and items, then those inside parts, such as a tool's result."""
    outer = [content for message in messages for content in _lists_of(message)]
    yield from outer
    for content in outer:
        for part in content:
            yield from _lists_of(part)


def _lists_of(value: object) -> list[list[object]]:
    if not isinstance(value, dict):
        return []
    found = (value.get(name) for name in ("content", "tool_calls", "output", "summary"))
    return [each for each in found if isinstance(each, list)]


FEW_PARTS = BeforeValidator(_check_parts)
Speculates = Annotated[bool | None, Field(description="false: no guessed tokens are computed; no answer changes")]


_MODEL_DEFAULT = "x-model-default"  # in a field's schema: the name of the number that a model may have a default for


def number_field(name: str, default: float, description: str = "", *, models: bool = True) -> Any:
    """A field that is null if absent, whose schema shows the default that holds then instead of null.

    With `models` a model's own default for the number `name` goes first (`show_model_defaults`).
    """
    said = f"default: the model's, or {default:g}" if models else ""
    return Field(
        None,
        description="; ".join(filter(None, (description, said))) or None,
        json_schema_extra={"default": default} | ({_MODEL_DEFAULT: name} if models else {}),
    )


def switch_field(default: bool, description: str | None = None) -> Any:
    """A field that is null if absent, whose schema shows the default that holds then instead of null."""
    return Field(None, description=description, json_schema_extra={"default": default})


def show_model_defaults(schemas: Iterable[dict[str, Any]], defaults: Mapping[str, float]) -> None:
    """Put the model's own defaults into the schemas of the fields that they hold for, in place."""
    for schema in schemas:
        for field in schema.get("properties", {}).values():
            name = field.pop(_MODEL_DEFAULT, None)
            if name in defaults:
                field["default"] = defaults[name]


FinishedBecause = Literal["stop", "length", "tool_calls", "abort"]


class ReplyModel(BaseModel):
    """A part of a reply, for the API document. Renderers write replies without these models."""

    model_config = ConfigDict(extra="forbid")


class CompletionHead(ReplyModel):
    """The fields of a completion, a chat completion and each of their chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class PromptTokensDetails(ReplyModel):
    cached_tokens: int


class CompletionTokensDetails(ReplyModel):
    reasoning_tokens: int | None = Field(None, description="for models that think before they answer")
    accepted_prediction_tokens: int | None = Field(None, description="with a prediction: its tokens that were right")
    rejected_prediction_tokens: int | None = Field(None, description="with a prediction: those that were wrong")


class UsageInfo(ReplyModel):
    """`completion_tokens`: tokens generated for the reply, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(ReplyModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


Prompts = list[str] | list[list[int]]

_MAX_ID = 2**31 - 1
_PIECE = 16_384  # ids that are checked at once
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_ID}, "minItems": 1}


def one_or_many(most: int, what: str) -> tuple[Any, Any]:
    """The annotations of a field of type `Prompts` with 1 to `most` items, which errors call `what`."""
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": most}
    lists = {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": most}
    schema = {"anyOf": [{"type": "string"}, texts, _TOKENS, lists]}
    return PlainValidator(lambda value: _check_prompts(value, most, what)), WithJsonSchema(schema)


def _check_prompts(value: object, most: int, what: str) -> Prompts:
    """All four forms, as a list of prompts.

    By hand: a union of types would report a wrong item once per form, and check a million ids while holding the GIL.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise ValueError("must not be empty")
    first = value[0]
    if type(first) is int:
        return [_check_ids(value)]
    if len(value) > most:
        raise ValueError(f"at most {most} {what} per request")
    if isinstance(first, str):
        texts = [item for item in value if isinstance(item, str)]
        if len(texts) == len(value):
            return texts
    elif isinstance(first, list):
        lists = [_check_ids(item) for item in value if isinstance(item, list)]
        if len(lists) == len(value):
            return lists
    raise ValueError("the items must be all strings, all token ids or all lists of token ids")


def _check_ids(ids: list[object]) -> list[int]:
    """Checks by operations on whole lists, some thousand ids at a time, since a prompt may have a million."""
    if not ids:
        raise ValueError("a prompt must have at least one token")
    for start in range(0, len(ids), _PIECE):
        piece = cast(list[int], ids[start : start + _PIECE])
        if set(map(type, piece)) != {int}:
            raise ValueError("token ids must be integers")
        if min(piece) < 0 or max(piece) > _MAX_ID:
            raise ValueError("token ids must be those of the vocabulary")
    return cast(list[int], ids)


_ABSENT: tuple[object, ...] = (None,)
_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, "", [], {})

BATCH_TIER = "flex"  # OpenAI's name of the service class batch

# Unsupported fields, with the values that turn them off.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": _ABSENT,
    "beam_width": (None, 1),
    "chat_template": _ABSENT,
    "documents": _EMPTY,
    "dry_multiplier": (None, 0, 0.0),
    "function_call": (None, "none"),
    "functions": _EMPTY,
    "guided_whitespace_pattern": _ABSENT,
    "input_embeds": _ABSENT,
    "kv_transfer_params": _ABSENT,
    "length_penalty": (None, 1, 1.0),
    "logits_processors": _EMPTY,
    "lora_path": _ABSENT,
    "mirostat": (None, 0),
    "mm_processor_kwargs": _EMPTY,
    "modalities": (None, ["text"]),
    "prompt_embeds": _ABSENT,
    "repetition_detection": _ABSENT,
    "return_hidden_states": _OFF,
    "stop_regex": _EMPTY,
    "structural_tag": _ABSENT,
    "suffix": (None, ""),
    "thinking_token_budget": _ABSENT,
    "tool_choice": (None, "none"),
    "tools": _EMPTY,
    "typical_p": (None, 1, 1.0),
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "xtc_probability": (None, 0, 0.0),
}

# Fields without effect, with the values for which that is right, so that they are not reported.
IGNORED: Mapping[str, tuple[object, ...]] = {
    "annotations": _EMPTY,
    "include_obfuscation": _OFF,
    "include_reasoning": (None, True),
    "parallel_tool_calls": (None, True),
    "separate_reasoning": (None, True),
    "service_tier": (None, "auto", "default", BATCH_TIER),
    "spaces_between_special_tokens": (None, True),
    "store": _OFF,
    "stream_reasoning": (None, True),
    "verbosity": (None, "medium"),
}

_HINTS: Mapping[str, str] = {
    "chat_template": "requests cannot bring templates; the operator sets one with --chat-template",
    "function_call": "it is the older form of 'tool_choice'; send that",
    "functions": "it is the older form of 'tools'; send those",
    "modalities": "only text is generated",
    "tool_choice": "functions are called in /v1/chat/completions",
    "tools": "functions are called in /v1/chat/completions",
    "suffix": "/v1/completions has it, for models that can write the middle of a text",
}


def review_extras(extras: Mapping[str, object] | None) -> list[str]:
    """The names to report as ignored, in the order given. Raises BadRequest for unsupported fields.

    Fields that would change the answer are refused, others reported; a field at its default is never an error.
    """
    ignored = []
    for name, value in (extras or {}).items():
        off_values = UNSUPPORTED.get(name)
        if off_values is not None:
            if not _is_among(value, off_values):
                hint = _HINTS.get(name)
                raise Unsupported(
                    f"'{name}' is not supported by this server" + (f": {hint}." if hint else "."), param=name
                )
        elif not _is_among(value, IGNORED.get(name, _ABSENT)):
            ignored.append(name)
    return ignored


def _is_among(value: object, candidates: tuple[object, ...]) -> bool:
    """Equality, without `False == 0` and `True == 1`."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in candidates)


MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_SEQUENCES = 64  # prompts times choices
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 65_536
MAX_BAD_WORDS = 128
MAX_LOGPROB_IDS = 128

_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")


class WireModel(BaseModel):
    """Strict types, finite numbers; unknown fields are kept in `model_extra`, to be reported."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _one_or_more(value: object) -> object:
    """A string becomes a list of one."""
    return [value] if isinstance(value, str) else value


def _check_bias(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"at most {MAX_BIASED_TOKENS} tokens may be biased")
    wrong = [key for key in value if not isinstance(key, str) or not _TOKEN_KEY.fullmatch(key)]
    if wrong:
        named = ", ".join(repr(str(key)[:32]) for key in wrong)
        verb = "is" if len(wrong) == 1 else "are"
        raise ValueError(f"the keys must be token ids written as decimal strings, and {named} {verb} none")
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for the context length")
    return value


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
KeptTokens = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_not_zero)]
TokenCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
NO_LIMIT = -1  # as llama-server's and LM Studio's clients write it
TokenLimit = Annotated[
    int,
    Field(ge=NO_LIMIT, le=2**31 - 1, description="-1: as many as the context has room for"),
]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Timeout = Annotated[float, Field(gt=0, le=86_400)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
ModelName = Annotated[str, Field(max_length=256)]
ServiceTier = Annotated[str, Field(max_length=64)]
RequestName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
CacheSalt = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")]
MAX_CACHE_TTL = 86_400  # seconds
CacheTtl = Annotated[float, Field(gt=0, le=MAX_CACHE_TTL, allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None,
    BeforeValidator(_one_or_more),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                    "maxItems": MAX_STOPS,
                },
                {"type": "null"},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
    BeforeValidator(_check_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": f"^({_TOKEN_KEY.pattern})$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_BIASED_TOKENS,
                },
                {"type": "null"},
            ]
        }
    ),
]


class StreamOptions(WireModel):
    include_usage: bool | None = Field(
        None, description="one last chunk with the usage and no choices; false: no usage anywhere"
    )
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")
    include_obfuscation: bool | None = Field(None, description="true is without effect, and reported")


class SamplingFields(WireModel):
    """The parameters of a token's distribution and the seed of its draw, by their names in the neutral request."""

    temperature: Temperature | None = number_field("temperature", 1.0, "below 1e-5 is greedy")
    top_p: TopP | None = number_field("top_p", 1.0)
    top_k: TopK | None = number_field("top_k", 0, "0 and -1 are off")
    min_p: Probability | None = number_field("min_p", 0.0)
    seed: Int64 | None = None
    presence_penalty: Penalty | None = number_field("presence_penalty", 0.0, models=False)
    frequency_penalty: Penalty | None = number_field("frequency_penalty", 0.0, models=False)
    repetition_penalty: RepetitionPenalty | None = number_field("repetition_penalty", 1.0, "1 is off")

    def given_numbers(self) -> dict[str, Any]:
        """The numbers that are not null, by their names, and these names as `given`."""
        given = {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}
        return given | ({"top_k": 0} if self.top_k == -1 else {}) | {"given": frozenset(given)}


class ServingFields(WireModel):
    """How a request is served, whatever it asks for."""

    model: ModelName | None = Field(None, description="a served name; null: the served one")
    priority: Int64 | None = Field(None, description="lower is earlier, under the priority policy")
    timeout: Timeout | None = Field(None, description="seconds; unfinished by then, it ends with 504")
    cache_salt: CacheSalt | None = Field(None, description="requests with different salts share no cached prefix")
    cache_ttl: CacheTtl | None = Field(None, description="seconds for which the prompt's cached prefix is kept")


class DecodingFields(SamplingFields):
    """The fields that decide which tokens are taken and which of them end a choice."""

    logit_bias: LogitBias = None
    min_tokens: TokenCount | None = number_field("min_tokens", 0, models=False)
    ignore_eos: bool | None = switch_field(False)
    speculation: Speculates = None
    stop: StopStrings = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_BIASED_TOKENS)] | None = None


WantsTimings = Annotated[
    bool | None, Field(description="llama-server's `timings` in the reply, of a stream in its last chunk")
]


class Timings(ReplyModel):
    """Counts of all prompts and choices, times of the longest in milliseconds; null: too short a time for a rate."""

    cache_n: int
    prompt_n: int = Field(description="without the cached ones")
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float = Field(description="from the first to the last token")
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    queue_ms: float


def bounded(limit: int | None) -> int | None:
    """The limit of a request's tokens; None: it has none."""
    return None if limit == NO_LIMIT else limit


class PromptProgress(ReplyModel):
    """How far a prompt is computed, in the form of llama-server."""

    total: int
    cache: int = Field(description="found in the prefix cache")
    processed: int = Field(description="computed or found")
    time_ms: float


class GenerationFields(DecodingFields, ServingFields):
    """Sampling, stopping and reply options of both endpoints."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = number_field("n", 1, models=False)
    stream: bool | None = switch_field(False)
    stream_options: StreamOptions | None = None

    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="words that must not be generated, as the tokenizer writes them"
    )

    max_tokens: TokenLimit | None = None
    include_stop_str_in_output: bool | None = switch_field(False)

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="keep only this many tokens of the prompt; -1 is the context length"
    )
    truncation_side: Annotated[str, Field(pattern="^(left|right)$")] | None = Field(
        None, description="which end is cut off; left by default"
    )
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="false is without effect, and reported")
    prompt_logprobs: LogprobCount | None = None
    logprob_token_ids: Annotated[TokenIds, Field(max_length=MAX_LOGPROB_IDS)] | None = Field(
        None, description="tokens to score in place of the most likely ones; implies logprobs"
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings: WantsTimings = None
    return_progress: bool | None = Field(
        None, description="llama-server's `prompt_progress` in chunks of a stream before the first token"
    )

    service_tier: ServiceTier | None = Field(None, description="flex: after requests without it; others are reported")
    request_id: RequestName | None = None


class TopLogprob(ReplyModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class InputTokens(ReplyModel):
    object: Literal["response.input_tokens"]
    input_tokens: int
