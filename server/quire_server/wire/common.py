"""The fields that completions and chat completions share, with their types and single-field ranges.

Promises: what validates here is finite, in range and bounded in size; null always means "not given".
Must not know: the model, its vocabulary, the context length, defaults.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_SEQUENCES = 64  # prompts times choices
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 65_536
MAX_BAD_WORDS = 128
MAX_LOGPROB_IDS = 128

_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")


class WireModel(BaseModel):
    """Strict types, finite numbers; fields nobody knows are kept in `model_extra`, to be reported."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _one_or_more(value: object) -> object:
    """`"a"` is `["a"]`."""
    return [value] if isinstance(value, str) else value


def _check_bias(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"at most {MAX_BIASED_TOKENS} tokens may be biased")
    for key in value:
        if not isinstance(key, str) or not _TOKEN_KEY.fullmatch(key):
            raise ValueError(f"the keys must be token ids written as decimal strings, and {str(key)[:32]!r} is none")
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for the context length")
    return value


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
TokenCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Timeout = Annotated[float, Field(gt=0, le=86_400)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
ServiceTier = Annotated[str, Field(max_length=64)]
RequestName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
CacheSalt = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")]
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


class GenerationFields(WireModel):
    """Sampling, stopping and reply options of both endpoints."""

    model: Annotated[str, Field(max_length=256)] | None = Field(None, description="a served name; null: the served one")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="below 1e-5 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="0 and -1 are off")
    min_p: Probability | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="words that must not be generated, as the tokenizer writes them"
    )

    max_tokens: TokenCount | None = None
    min_tokens: TokenCount | None = None
    ignore_eos: bool | None = None
    stop: StopStrings = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_BIASED_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_not_zero)] | None = Field(
        None, description="keep only this many tokens of the prompt; -1 is the context length"
    )
    truncation_side: Annotated[str, Field(pattern="^(left|right)$")] | None = Field(
        None, description="which end is cut off; left by default"
    )
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="false is without effect, and reported")
    prompt_logprobs: LogprobCount | None = None
    logprob_token_ids: Annotated[TokenIds, Field(max_length=MAX_LOGPROB_IDS)] | None = Field(
        None, description="tokens whose log-probabilities are told beside the most likely ones; implies logprobs"
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    priority: Int64 | None = Field(None, description="lower is earlier, under the priority policy")
    timeout: Timeout | None = Field(None, description="seconds; unfinished by then, it ends with 504")
    service_tier: ServiceTier | None = Field(None, description="flex: after requests without it; others are reported")
    cache_salt: CacheSalt | None = Field(None, description="requests with different salts share no cached prefix")
    request_id: RequestName | None = None
