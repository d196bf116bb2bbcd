"""`SamplingParams`: what is asked of each continuation, with the names and defaults of vLLM's.

Promises: one that exists has passed the checks of the server's own request model, so that both refuse the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from quire_server.answering.options import GenerationOptions, SamplingNumbers
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.errors import BadRequest
from quire_server.http.body import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of each continuation must be: exactly one of these."""

    json: Mapping[str, object] | str | None = None  # a JSON schema, or its text
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # in Lark, or in EBNF as xgrammar and llama.cpp have it
    json_object: bool | None = None
    disable_any_whitespace: bool = False  # of JSON: none between its parts


GuidedDecodingParams = StructuredOutputsParams  # the older name


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingNumbers):
    """How continuations are chosen and where they end. Raises ValueError for values that are not supported.

    An argument that is not here is a TypeError. What depends on the model, such as token ids, is checked at its use.
    """

    n: int = 1
    seed: int | None = None  # None: the LLM's, else random
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None  # as the tokenizer writes them
    max_tokens: int | None = 16  # None: all that fits
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # k: of the chosen token and of the k most likely ones
    logprob_token_ids: Sequence[int] | None = None  # theirs too; implies logprobs
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: GuidedDecodingParams | None = None  # the older name of structured_outputs
    truncate_prompt_tokens: int | None = None  # keep only the prompt's last ones; -1: what leaves room for the answer

    def __post_init__(self) -> None:
        try:
            self.options()
        except BadRequest as error:
            raise ValueError(error.message) from None

    def options(self) -> GenerationOptions:
        """The neutral request of these parameters, its prompt still to be put in. Raises BadRequest."""
        request = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        if older := request.pop("guided_decoding"):
            if request["structured_outputs"] is not None:
                raise BadRequest("'guided_decoding' is the older name of 'structured_outputs'; give one.")
            request["structured_outputs"] = older
        options = validate(CompletionRequest, {"prompt": "", **request}).options()
        # Completions generate 16 tokens when not told; here that is the default, and None says "all that fits".
        return replace(options, stop=replace(options.stop, default_max_tokens=None))


def _plain(value: object) -> object:
    """A value as JSON would bring it."""
    if isinstance(value, StructuredOutputsParams):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value
