"""The wire models of POST /v1/completions: the request, the reply and the chunks of a streamed reply."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from quire_server.answering.options import GenerationOptions, Infill, ReasoningOptions
from quire_server.dialects.common import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    CompletionHead,
    FinishedBecause,
    LogprobCount,
    PromptLogprobs,
    PromptProgress,
    Prompts,
    ReplyModel,
    Timings,
    TokenLimit,
    UsageInfo,
    bounded,
    number_field,
    one_or_many,
)
from quire_server.dialects.options import generation_options, review
from quire_server.dialects.structure import StructuredFields
from quire_server.errors import BadRequest

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_check_prompt, _prompt_schema = one_or_many(MAX_PROMPTS, "prompts")


class CompletionRequest(StructuredFields):
    prompt: Annotated[Prompts, _check_prompt, _prompt_schema]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None,
        description="choices to generate; the n likeliest are returned, the usage counts all; streams need beam search",
    )
    max_tokens: TokenLimit | None = number_field("max_tokens", _DEFAULT_MAX_TOKENS, models=False)
    suffix: str | None = Field(None, description="the text after the middle, for models that can fill in the middle")
    echo: bool | None = Field(None, description="the prompt is part of the text, and of the logprobs")
    logprobs: LogprobCount | None = Field(
        None, description="0: of the chosen token; k: and the k most likely ones, at most 20 unless the server has more"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        n = self.n or 1
        generated, name = (n, "n") if self.best_of is None else (self.best_of, "best_of")
        if generated < n:
            raise BadRequest("'best_of' must be at least 'n'.", param="best_of")
        if self.use_beam_search and self.beam_width is not None:
            generated, name = self.beam_width, "beam_width"
        if generated > n and self.stream and not self.use_beam_search:
            raise BadRequest("'best_of' cannot be more than 'n' in a stream.", param="best_of")
        if len(self.prompt) * generated > MAX_SEQUENCES:
            raise BadRequest(f"Prompts times '{name}' must be at most {MAX_SEQUENCES}.", param=name)
        return self

    def options(self) -> GenerationOptions:
        """The neutral options. Raises BadRequest for unsupported values."""
        ignored = review(self)
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("'max_tokens' must be at least 1, unless 'echo' is true.", param="max_tokens")
        num_prompt_logprobs = self.prompt_logprobs
        num_logprobs = 0 if self.logprob_token_ids else self.logprobs
        if self.echo and num_logprobs is not None:
            num_prompt_logprobs = max(num_logprobs, self.prompt_logprobs or 0)
        options = generation_options(
            self,
            source=self.prompt,
            source_param="prompt",
            add_special_tokens=self.add_special_tokens is not False,
            max_tokens=bounded(self.max_tokens),
            max_tokens_param="max_tokens",
            default_max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else None,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            echo=bool(self.echo),
            ignored=ignored,
            reasoning=ReasoningOptions(),
            beam=self.beam_options(self.best_of),
        )
        if self.suffix:
            for name, given in (("echo", self.echo), ("truncate_prompt_tokens", self.truncate_prompt_tokens)):
                if given:
                    raise BadRequest(f"'{name}' and 'suffix' cannot be given together.", param=name)
            options = replace(options, prompt=replace(options.prompt, infill=Infill(suffix=self.suffix)))
        n = options.sampling.n
        if self.best_of is None or self.best_of == n or options.beam is not None:
            return options
        # Ranking needs log-probabilities; the reply shows them only if they were requested.
        num_scored = options.sampling.num_logprobs or 0
        sampling = replace(options.sampling, n=self.best_of, n_param="best_of", num_logprobs=num_scored)
        return replace(options, sampling=sampling, reply=replace(options.reply, keep_best=n))


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
    beam_score: float | None = Field(
        None, description="the score of a beam search hypothesis, by which choices are ranked"
    )


class CompletionResponse(CompletionHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageInfo
    timings: Timings | None = None


class CompletionChunkChoice(ReplyModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBecause | None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    beam_score: float | None = Field(
        None, description="the score of a beam search hypothesis, by which choices are ranked"
    )


class CompletionChunk(CompletionHead):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None
