"""Converts the fields that completions and chat completions share into `GenerationOptions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire_server.answering.options import (
    BeamOptions,
    Conversation,
    GenerationOptions,
    PromptOptions,
    ReasoningOptions,
    ReplyOptions,
    SamplingOptions,
    StopOptions,
    ToolOptions,
)
from quire_server.dialects.common import BATCH_TIER, review_extras
from quire_server.dialects.structure import StructuredFields
from quire_server.errors import BadRequest


def review(fields: StructuredFields) -> list[str]:
    """The names of fields without effect. Raises BadRequest for unsupported fields and combinations."""
    known = {
        "spaces_between_special_tokens": fields.spaces_between_special_tokens,
        "service_tier": fields.service_tier,
    }
    ignored = review_extras(known | (fields.model_extra or {}))
    stream = fields.stream_options
    if stream is not None:
        if not fields.stream:
            raise BadRequest("'stream_options' needs 'stream': true.", param="stream_options")
        obfuscation = {"include_obfuscation": stream.include_obfuscation}
        ignored += [f"stream_options.{name}" for name in review_extras(obfuscation | (stream.model_extra or {}))]
        if stream.include_usage is False and stream.continuous_usage_stats:
            ignored.append("stream_options.continuous_usage_stats")
    if fields.return_progress and not fields.stream:
        ignored.append("return_progress")
    ignored += fields.ignored_structure_fields()
    if fields.stream and fields.prompt_logprobs is not None:
        raise BadRequest("'prompt_logprobs' cannot be streamed.", param="prompt_logprobs")
    return ignored


def generation_options(
    fields: StructuredFields,
    *,
    source: Conversation | Sequence[str | Sequence[int]],
    source_param: str,
    add_special_tokens: bool,
    max_tokens: int | None,
    max_tokens_param: str,
    default_max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    logprobs_param: str = "logprobs",
    echo: bool,
    begins_with: str = "",
    ignored: Iterable[str],
    reasoning: ReasoningOptions,
    beam: BeamOptions | None,
    tools: ToolOptions | None = None,
    prediction: str = "",
) -> GenerationOptions:
    """The options from `fields` and from the endpoint's own fields."""
    stream = fields.stream_options
    return GenerationOptions(
        prompt=PromptOptions(
            source=source,
            param=source_param,
            add_special_tokens=add_special_tokens,
            keep_tokens=fields.truncate_prompt_tokens,
            keep_start=fields.truncation_side == "right",
            **_given(cache_salt=fields.cache_salt, cache_ttl=fields.cache_ttl),
        ),
        sampling=SamplingOptions(
            **fields.given_numbers(),
            **_given(n=fields.n),
            logit_bias=tuple((int(key), value) for key, value in (fields.logit_bias or {}).items()),
            allowed_token_ids=tuple(fields.allowed_token_ids or ()),
            bad_words=tuple(fields.bad_words or ()),
            num_logprobs=num_logprobs,
            logprobs_param=logprobs_param,
            logprob_token_ids=tuple(fields.logprob_token_ids or ()),
            num_prompt_logprobs=num_prompt_logprobs,
        ),
        beam=beam,
        stop=StopOptions(
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            default_max_tokens=default_max_tokens,
            strings=tuple(fields.stop or ()),
            token_ids=tuple(fields.stop_token_ids or ()),
            include_stop=bool(fields.include_stop_str_in_output),
            **_given(min_tokens=fields.min_tokens, ignore_eos=fields.ignore_eos),
        ),
        reply=ReplyOptions(
            id=fields.request_id,
            stream=bool(fields.stream),
            echo=echo,
            begins_with=begins_with,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=fields.prompt_logprobs,
            token_ids=bool(fields.return_token_ids),
            names_are_ids=bool(fields.return_tokens_as_token_ids),
            usage_at_end=stream is not None and bool(stream.include_usage),
            usage_always=stream is not None
            and bool(stream.continuous_usage_stats)
            and stream.include_usage is not False,
            progress=bool(fields.return_progress),
            timings=bool(fields.timings),
            **_given(skip_special_tokens=fields.skip_special_tokens),
        ),
        structure=fields.structure(),
        reasoning=reasoning,
        tools=tools,
        model=fields.model,
        ignored=tuple(dict.fromkeys(ignored)),
        timeout=fields.timeout,
        is_batch=fields.service_tier == BATCH_TIER,
        prediction=prediction,
        **_given(priority=fields.priority, speculates=fields.speculation),
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
