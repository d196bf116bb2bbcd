"""From a request's fields to the engine's SamplingParams and StopParams.

Promises: defaults are applied first, and what then results is checked once, against the model and the KV pool;
whatever passes can be computed. Must not know: HTTP beyond the errors it raises, how tokens are sampled.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from quire_engine.config import EnginePlan
from quire_engine.types import SamplingParams, StopParams
from quire_server.errors import BadRequest, ContextLengthExceeded
from quire_server.text.tokenizer import TextTokenizer
from quire_server.wire.common import GenerationFields

T = TypeVar("T")

GREEDY_BELOW = 1e-5  # dividing logits by less overflows; the answer would be the greedy one anyway
COMPLETION_TOKENS = 16  # what OpenAI's completions generate when not told


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a request is checked against."""

    num_token_ids: int  # ids below are known to the tokenizer and have logits
    max_model_len: int
    num_blocks: int
    block_size: int
    max_choices: int
    max_logprobs: int

    @classmethod
    def of(cls, plan: EnginePlan, tokenizer: TextTokenizer, max_logprobs: int) -> ModelLimits:
        scheduler = plan.scheduler
        return cls(
            num_token_ids=min(plan.vocab_size, tokenizer.vocab_size),
            max_model_len=scheduler.max_model_len,
            num_blocks=scheduler.num_blocks,
            block_size=scheduler.block_size,
            max_choices=min(scheduler.max_num_seqs, scheduler.min_chunk),
            max_logprobs=max_logprobs,
        )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.num_token_ids:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < self.num_token_ids)
            raise BadRequest(
                f"Token id {wrong} in '{param}' is outside the vocabulary of {self.num_token_ids} ids.", param=param
            )

    def max_new_tokens(self, prompt_tokens: int, n: int) -> int:
        """The most tokens per choice that the KV pool holds; -1 if not even the prompt fits.

        Full prompt blocks are shared, the rest is per choice, and a choice's last token is never stored.
        """
        full, rest = divmod(prompt_tokens, self.block_size)
        if full + (rest > 0) > self.num_blocks:
            return -1
        return max((self.num_blocks - full) // n * self.block_size - rest + 1, 1)


def resolve_sampling(
    fields: GenerationFields,
    *,
    tokenizer: TextTokenizer,
    limits: ModelLimits,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> SamplingParams:
    """Everything but the seed, which `with_seed` gives per prompt. Raises BadRequest."""
    n = _or(fields.n, 1)
    if n > limits.max_choices:
        raise BadRequest(f"'n' must be at most {limits.max_choices} on this server.", param="n")
    for count, param in ((num_logprobs, "logprobs"), (num_prompt_logprobs, "prompt_logprobs")):
        if count is not None and count > limits.max_logprobs:
            raise BadRequest(f"'{param}' must be at most {limits.max_logprobs} on this server.", param=param)
    bias = tuple((int(key), float(value)) for key, value in (fields.logit_bias or {}).items())
    allowed = tuple(dict.fromkeys(fields.allowed_token_ids or ()))
    banned = banned_token_ids(fields.bad_words or (), tokenizer)
    limits.check_ids([token_id for token_id, _ in bias], "logit_bias")
    limits.check_ids(allowed, "allowed_token_ids")
    limits.check_ids(banned, "bad_words")
    if allowed and not set(allowed).difference(banned):
        raise BadRequest("'bad_words' leaves none of 'allowed_token_ids' to choose from.", param="bad_words")
    temperature = float(_or(fields.temperature, 1.0))
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=float(_or(fields.top_p, 1.0)),
        top_k=max(_or(fields.top_k, 0), 0),
        min_p=float(_or(fields.min_p, 0.0)),
        presence_penalty=float(_or(fields.presence_penalty, 0.0)),
        frequency_penalty=float(_or(fields.frequency_penalty, 0.0)),
        repetition_penalty=float(_or(fields.repetition_penalty, 1.0)),
        logit_bias=bias,
        allowed_token_ids=allowed,
        banned_token_ids=banned,
        min_tokens=_or(fields.min_tokens, 0),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """A max_tokens that was lowered: by how much is for the client to see."""

    param: str
    used: int


def resolve_stop(
    fields: GenerationFields,
    sampling: SamplingParams,
    *,
    prompt_tokens: int,
    prompt_param: str,
    asked: int | None,
    asked_param: str,
    default: int | None,
    tokenizer: TextTokenizer,
    limits: ModelLimits,
) -> tuple[StopParams, Clamp | None]:
    """When one prompt's choices end. `asked` is the client's max_tokens; `default` None is all that fits.

    What was asked is lowered to the context, and refused when the pool can never hold it; a default is lowered to both.
    Raises ContextLengthExceeded, BadRequest.
    """
    n = _or(fields.n, 1)
    room = limits.max_model_len - prompt_tokens
    # A prompt may fill the whole context only when nothing is to be generated after it.
    if room < 0 or (room == 0 and asked != 0):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limits.max_model_len} tokens, but the prompt has"
            f" {prompt_tokens} tokens" + (" and leaves no room for an answer." if room == 0 else "."),
            param=prompt_param,
        )
    pool_room = limits.max_new_tokens(prompt_tokens, n)
    wanted = asked if asked is not None else _or(default, room)
    max_new_tokens = min(wanted, room)
    if asked is None:
        max_new_tokens = min(max_new_tokens, pool_room)
    if pool_room < 0:
        raise ContextLengthExceeded(
            f"The prompt has {prompt_tokens} tokens, but the server's KV cache holds only"
            f" {limits.num_blocks * limits.block_size}.",
            param=prompt_param,
        )
    if max_new_tokens > pool_room:
        raise ContextLengthExceeded(
            f"The request needs more KV cache than the server has: {prompt_tokens} prompt tokens and {n} x"
            f" {max_new_tokens} new tokens; the largest {asked_param} that fits is {pool_room}.",
            param=asked_param,
        )
    if sampling.min_tokens > max_new_tokens:
        raise BadRequest(
            f"'min_tokens' is {sampling.min_tokens}, more than the {max_new_tokens} tokens that may be generated.",
            param="min_tokens",
        )
    stop_ids = tuple(dict.fromkeys(fields.stop_token_ids or ()))
    limits.check_ids(stop_ids, "stop_token_ids")
    if not fields.ignore_eos:
        stop_ids += tuple(token_id for token_id in tokenizer.eos_token_ids if token_id not in stop_ids)
    if sampling.min_tokens and sampling.allowed_token_ids:
        possible = set(sampling.allowed_token_ids).difference(sampling.banned_token_ids, stop_ids)
        if not possible:
            raise BadRequest(
                "With 'min_tokens', some of 'allowed_token_ids' must be tokens that do not stop.",
                param="allowed_token_ids",
            )
    lowered = asked is not None and max_new_tokens < asked
    return (
        StopParams(max_new_tokens=max_new_tokens, stop_token_ids=stop_ids),
        Clamp(param=asked_param, used=max_new_tokens) if lowered else None,
    )


def with_seed(
    sampling: SamplingParams, *, requested: int | None, server_seed: int | None, token_ids: Sequence[int]
) -> SamplingParams:
    """The seed of one prompt: the client's; else, with --seed, a digest of that and the prompt; else 63 random bits.

    The digest makes an unseeded request repeatable whatever else the server does: the same prompt gets the same
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


def banned_token_ids(words: Iterable[str], tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ids that write these words, at a text's beginning and after a space. Raises BadRequest for longer words.

    A spelling of several tokens is covered when one of them is banned already: " a" written as " " and "a".
    """
    banned: dict[int, None] = {}
    for word in words:
        spellings = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip(" "))]
        ids = {spelling[0] for spelling in spellings if len(spelling) == 1}
        if any(ids.isdisjoint(spelling) for spelling in spellings):
            raise BadRequest(
                "Only words of a single token are supported in 'bad_words'; one of these takes several.",
                param="bad_words",
                code="unsupported_parameter",
            )
        banned.update(dict.fromkeys(sorted(ids)))
    return tuple(banned)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
