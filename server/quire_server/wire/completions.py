"""The wire models of POST /v1/completions: the request, the reply and the chunks of a streamed reply.

Promises: a valid request's prompt is a non-empty list of at most 64 texts or token-id lists.
Must not know: the model, its vocabulary, how text is generated.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from quire_server.answering.options import GenerationOptions, ReasoningOptions
from quire_server.errors import BadRequest
from quire_server.wire.common import MAX_LOGPROBS, MAX_PROMPTS, MAX_SEQUENCES, GenerationFields, LogprobCount
from quire_server.wire.options import generation_options, review
from quire_server.wire.reply import FinishedBecause, PromptLogprobs, ReplyModel, UsageInfo

Prompts = list[str] | list[list[int]]

_DEFAULT_MAX_TOKENS = 16  # what OpenAI's completions generate when not told
_MAX_ID = 2**31 - 1
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_ID}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS}
_TOKEN_LISTS = {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_PROMPTS}


def _check_prompt(value: object) -> Prompts:
    """All four forms, as a list of prompts. By hand: a union would report a wrong item once per form and item."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise ValueError("must not be empty")
    first = value[0]
    if type(first) is int:
        return [_check_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts per request")
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
    """By whole-list operations: a prompt may have a million ids."""
    if not ids:
        raise ValueError("a prompt must have at least one token")
    if set(map(type, ids)) != {int}:
        raise ValueError("token ids must be integers")
    checked = cast(list[int], ids)
    if min(checked) < 0 or max(checked) > _MAX_ID:
        raise ValueError("token ids must be those of the vocabulary")
    return checked


class CompletionRequest(GenerationFields):
    prompt: Annotated[
        Prompts,
        BeforeValidator(_check_prompt),
        WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _TOKENS, _TOKEN_LISTS]}),
    ]
    best_of: int | None = Field(None, description="null or equal to n")
    echo: bool | None = Field(None, description="the prompt is part of the text, and of the logprobs")
    logprobs: LogprobCount | None = Field(
        None, description=f"0: of the chosen token; k: and the k most likely ones; at most {MAX_LOGPROBS}"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        n = self.n or 1
        if len(self.prompt) * n > MAX_SEQUENCES:
            raise BadRequest(f"Prompts times 'n' must be at most {MAX_SEQUENCES}.", param="n")
        if self.best_of is not None and self.best_of != n:
            raise BadRequest("'best_of' must be null or equal to 'n'.", param="best_of")
        return self

    def options(self) -> GenerationOptions:
        """The neutral request. Raises BadRequest for what is not supported."""
        ignored = review(self)
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("'max_tokens' must be at least 1, unless 'echo' is true.", param="max_tokens")
        num_prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            num_prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        return generation_options(
            self,
            source=self.prompt,
            source_param="prompt",
            add_special_tokens=self.add_special_tokens is not False,
            max_tokens=self.max_tokens,
            max_tokens_param="max_tokens",
            default_max_tokens=_DEFAULT_MAX_TOKENS,
            num_logprobs=self.logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            echo=bool(self.echo),
            ignored=ignored,
            reasoning=ReasoningOptions(),
        )


class CompletionLogprobs(ReplyModel):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ReplyModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBecause
    stop_reason: str | int | None = Field(description="the matched stop string or token id; null otherwise")
    prompt_logprobs: PromptLogprobs | None = Field(description="null without prompt_logprobs in the request")
    prompt_token_ids: list[int] | None = Field(description="null without return_token_ids")
    token_ids: list[int] | None = Field(description="null without return_token_ids")


class CompletionResponse(ReplyModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionChunkChoice(ReplyModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBecause | None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionChunk(ReplyModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | None = None
