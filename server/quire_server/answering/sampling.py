"""Turns a request's options into the engine's SamplingParams and StopParams.

The values are checked against the model and the KV pool here; a request that passes can be computed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import SamplingParams, StopParams
from quire_server.answering.options import GenerationOptions, SamplingNumbers
from quire_server.errors import BadRequest, ContextLengthExceeded
from quire_server.text.tokenizer import TextTokenizer

USUAL_LOGPROBS = 20  # alternatives of each token, as OpenAI has them; any number of tokens may have so many
MOST_SCORES = 4 << 20  # log-probabilities of a reply with more alternatives, some 100 bytes each
_MOST_NAMED = 1024  # wrong ids in an error: as many as a bias may have
GREEDY_BELOW = 1e-5  # dividing logits by less overflows; the answer would be the greedy one anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The limits of the model and the server that requests are checked against."""

    num_token_ids: int  # smaller ids are in the tokenizer and have logits
    scheduler: SchedulerConfig
    max_logprobs: int
    most_tokens: int | None = None  # new tokens of a choice, whatever a request asks for

    @classmethod
    def of(
        cls, plan: EnginePlan, tokenizer: TextTokenizer, max_logprobs: int, most_tokens: int | None = None
    ) -> ModelLimits:
        return cls(
            num_token_ids=min(plan.model.vocab_size, tokenizer.vocab_size),
            scheduler=plan.scheduler,
            max_logprobs=max_logprobs,
            most_tokens=most_tokens,
        )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.num_token_ids:
            wrong = [token_id for token_id in ids if not 0 <= token_id < self.num_token_ids]
            named = ", ".join(map(str, wrong[:_MOST_NAMED])) + (" and more" if len(wrong) > _MOST_NAMED else "")
            start, verb = ("Token id", "is") if len(wrong) == 1 else ("Token ids", "are")
            raise BadRequest(
                f"{start} {named} in '{param}' {verb} outside the vocabulary of {self.num_token_ids} ids.", param=param
            )

    def check_length(self, least: int, param: str, *, is_exact: bool) -> None:
        """Raises ContextLengthExceeded if a prompt of `least` tokens, or of more without `is_exact`, can never fit."""
        longest = self.scheduler.max_model_len
        if least > longest:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens, but the prompt has"
                f"{'' if is_exact else ' at least'} {least} tokens.",
                param=param,
            )


def with_defaults(
    options: GenerationOptions, numbers: Mapping[str, float], max_tokens: int | None
) -> GenerationOptions:
    """The options with a model's own defaults, by the names of `SamplingNumbers`, for what the request leaves out.

    A limit of the dialect, such as the 16 tokens of completions, goes before the model's. Beams are ranked by the
    model's own log-probabilities, so they take no numbers.
    """
    taken: dict[str, Any] = {}
    if options.beam is None:
        taken = {name: value for name, value in numbers.items() if name not in options.sampling.given}
    limit = options.stop.default_max_tokens or max_tokens
    return replace(
        options,
        sampling=replace(options.sampling, **taken),
        stop=replace(options.stop, default_max_tokens=limit),
    )


def resolve_sampling(options: GenerationOptions, *, tokenizer: TextTokenizer, limits: ModelLimits) -> SamplingParams:
    """All sampling parameters except the seed, which `with_seed` sets per prompt. Raises BadRequest."""
    asked = options.sampling
    max_choices = limits.scheduler.limits.max_choices
    if asked.n > max_choices:
        raise BadRequest(f"'{asked.n_param}' must be at most {max_choices} on this server.", param=asked.n_param)
    for count, param in ((asked.num_logprobs, asked.logprobs_param), (asked.num_prompt_logprobs, "prompt_logprobs")):
        if count is not None and count > limits.max_logprobs:
            raise BadRequest(f"'{param}' must be at most {limits.max_logprobs} on this server.", param=param)
    allowed = tuple(dict.fromkeys(asked.allowed_token_ids))
    banned = banned_words(asked.bad_words, tokenizer)
    limits.check_ids([token_id for token_id, _ in asked.logit_bias], "logit_bias")
    limits.check_ids(allowed, "allowed_token_ids")
    for ids in (banned.token_ids, *banned.sequences):
        limits.check_ids(ids, "bad_words")
    limits.check_ids(asked.logprob_token_ids, "logprob_token_ids")
    if allowed and not set(allowed).difference(banned.token_ids):
        raise BadRequest("'bad_words' leaves none of 'allowed_token_ids' to choose from.", param="bad_words")
    numbers = {field.name: getattr(asked, field.name) for field in fields(SamplingNumbers)}
    if asked.temperature < GREEDY_BELOW:
        numbers["temperature"] = 0.0
    return SamplingParams(
        **numbers,
        logit_bias=asked.logit_bias,
        allowed_token_ids=allowed,
        banned_token_ids=banned.token_ids,
        banned_sequences=banned.sequences,
        min_tokens=options.stop.min_tokens,
        num_logprobs=asked.num_logprobs,
        logprob_token_ids=tuple(dict.fromkeys(asked.logprob_token_ids)),
        num_prompt_logprobs=asked.num_prompt_logprobs,
    )


def resolve_stop(
    options: GenerationOptions,
    sampling: SamplingParams,
    *,
    prompt_tokens: int,
    tokenizer: TextTokenizer,
    limits: ModelLimits,
) -> StopParams:
    """The stop parameters of one prompt's choices.

    The requested max_tokens is lowered to the context length and the operator's limit, and refused if the pool can
    never hold it; a default is lowered to all of them. Raises ContextLengthExceeded, BadRequest.
    """
    n, asked, default = options.num_sequences, options.stop.max_tokens, options.stop.default_max_tokens
    room = limits.scheduler.max_model_len - prompt_tokens
    # A prompt may fill the whole context only when nothing is to be generated after it.
    if room < 0 or (room == 0 and asked != 0):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limits.scheduler.max_model_len} tokens, but the prompt has"
            f" {prompt_tokens} tokens" + (" and leaves no room for an answer." if room == 0 else "."),
            param=options.prompt.param,
        )
    largest = limits.scheduler.largest_max_tokens(num_prompt=prompt_tokens, n=n)
    wanted = asked if asked is not None else default
    max_new_tokens = min(each for each in (wanted, room, limits.most_tokens) if each is not None)
    if asked is None:
        max_new_tokens = min(max_new_tokens, largest)
    if largest < 0:
        raise ContextLengthExceeded(
            f"The prompt has {prompt_tokens} tokens, but the server's KV cache holds only {limits.scheduler.longest}.",
            param=options.prompt.param,
        )
    if max_new_tokens > largest:
        raise ContextLengthExceeded(
            f"The request needs more KV cache than the server has: {prompt_tokens} prompt tokens and {n} x"
            f" {max_new_tokens} new tokens; the largest {options.stop.max_tokens_param} that fits is {largest}.",
            param=options.stop.max_tokens_param,
        )
    if sampling.min_tokens > max_new_tokens:
        raise BadRequest(
            f"'min_tokens' is {sampling.min_tokens}, more than the {max_new_tokens} tokens that may be generated.",
            param="min_tokens",
        )
    _check_scores(sampling.num_logprobs, n * max_new_tokens, options.sampling.logprobs_param)
    _check_scores(sampling.num_prompt_logprobs, prompt_tokens, "prompt_logprobs")
    stop_ids = tuple(dict.fromkeys(options.stop.token_ids))
    limits.check_ids(stop_ids, "stop_token_ids")
    if not options.stop.ignore_eos:
        stop_ids += tuple(token_id for token_id in tokenizer.eos_token_ids if token_id not in stop_ids)
    if sampling.min_tokens and sampling.allowed_token_ids:
        possible = set(sampling.allowed_token_ids).difference(sampling.banned_token_ids, stop_ids)
        if not possible:
            raise BadRequest(
                "With 'min_tokens', some of 'allowed_token_ids' must be tokens that do not stop.",
                param="allowed_token_ids",
            )
    return StopParams(max_new_tokens=max_new_tokens, stop_token_ids=stop_ids)


def _check_scores(count: int | None, num_tokens: int, param: str) -> None:
    """Bound the memory of a reply with more alternatives than the usual ones. Raises BadRequest."""
    if count is not None and count > USUAL_LOGPROBS and count * num_tokens > MOST_SCORES:
        raise BadRequest(
            f"'{param}' is {count}, which for {num_tokens} tokens is more than a reply may hold; ask for"
            f" {max(USUAL_LOGPROBS, MOST_SCORES // num_tokens)} or for fewer tokens.",
            param=param,
        )


def with_seed(
    sampling: SamplingParams, *, requested: int | None, server_seed: int | None, token_ids: Sequence[int]
) -> SamplingParams:
    """Set one prompt's seed: the client's; else, with --seed, a digest of that and the prompt; else 63 random bits.

    The digest makes a request without a seed repeatable, whatever else the server does: the same prompt gets the same
    answer. A client's seed is used for each of its prompts; choices differ by their index.
    """
    if requested is not None:
        return replace(sampling, seed=requested)
    if sampling.is_greedy:
        return sampling
    if server_seed is None:
        return replace(sampling, seed=secrets.randbits(63))
    digest = hashlib.sha256(repr((server_seed, tuple(token_ids))).encode())
    return replace(sampling, seed=int.from_bytes(digest.digest()[:8]) >> 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedWords:
    """Banned words as token ids: single ones, and sequences of two or more."""

    token_ids: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]


def banned_words(words: Iterable[str], tokenizer: TextTokenizer) -> BannedWords:
    """The token ids of these words, at the beginning of a text and after a space.

    A spelling of several tokens is left out if one of them is banned already: " a" written as " " and "a". Other ways
    to split a word are not covered: a model can still write a banned word in smaller pieces.
    """
    spellings = [
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for word in words
        for text in (word, " " + word.lstrip(" "))
    ]
    ids = dict.fromkeys(spelling[0] for spelling in spellings if len(spelling) == 1)
    several = dict.fromkeys(spelling for spelling in spellings if len(spelling) > 1 and ids.keys().isdisjoint(spelling))
    return BannedWords(token_ids=tuple(ids), sequences=tuple(several))
