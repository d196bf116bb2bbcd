"""Checks a front's requests before a node's engine has them, as a server checks those of its own clients.

A front that holds the cluster's key may still be wrong, or another version: no number in one of its frames may end an
engine that serves other fronts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from quire_engine.contract.errors import ProtocolError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import MAX_LOGPROBS, GenerationRequest

MOST_CHOICES = 1024
_MOST_NAME = 4096  # characters of a tenant, a salt, a path
_MOST_GRAMMAR = 4 << 20  # characters
_MOST_SECONDS = 1e9
_INT64 = 1 << 63


def check_shape(request: GenerationRequest) -> None:
    """Check what even a refusal is as large as. Raises ProtocolError."""
    if not 1 <= request.n <= MOST_CHOICES:
        raise ProtocolError(f"a request for {request.n} choices, where 1 to {MOST_CHOICES} are possible")
    if not 1 <= len(request.request_id) <= _MOST_NAME:
        raise ProtocolError(f"a request with a name of {len(request.request_id)} characters")
    if len(request.resumed_token_ids) not in (0, request.n):
        raise ProtocolError(f"a request with {len(request.resumed_token_ids)} answers for {request.n} choices")


def wrong_in(request: GenerationRequest, plan: EnginePlan) -> str:
    """The first thing in a request that this engine cannot have, in a few words; empty: there is none."""
    return next(_wrong_numbers(request), "") or next(_wrong_tokens(request, plan), "")


def _wrong_tokens(request: GenerationRequest, plan: EnginePlan) -> Iterator[str]:
    sampling, stop, longest = request.sampling, request.stop, plan.scheduler.max_model_len
    if not 1 <= len(request.prompt_token_ids) <= longest:
        yield f"a prompt of {len(request.prompt_token_ids)} tokens"
    if not 0 <= stop.max_new_tokens <= longest:
        yield f"{stop.max_new_tokens} tokens to compute"
    lists = {
        "prompt": request.prompt_token_ids,
        "stop_token_ids": stop.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids,
        "banned_token_ids": sampling.banned_token_ids,
        "banned_sequences": tuple(each for ids in sampling.banned_sequences for each in ids),
        "logit_bias": tuple(token for token, _ in sampling.logit_bias),
        "logprob_token_ids": sampling.logprob_token_ids,
        "prediction": request.prediction,
        "resumed_token_ids": tuple(each for ids in request.resumed_token_ids for each in ids),
        "thinking_opener": () if sampling.thinking_opener is None else (sampling.thinking_opener,),
    }
    if sampling.thinking is not None:
        lists["thinking"] = (*sampling.thinking.end_ids, *sampling.thinking.start_ids)
    for name, ids in lists.items():
        if ids and not (min(ids) >= 0 and max(ids) < plan.model.vocab_size):
            yield f"a token in {name} that the model does not have"
    if any(len(ids) > longest for ids in request.resumed_token_ids):
        yield "an answer that is longer than the context"
    if any(not 0 <= choice < request.n for choice in request.finished_choices):
        yield "a choice that it does not have"


def _wrong_numbers(request: GenerationRequest) -> Iterator[str]:
    sampling, beam = request.sampling, request.beam
    thinking = 0 if sampling.thinking is None else sampling.thinking.max_tokens
    bounds: dict[str, tuple[float, float, float]] = {
        "temperature": (sampling.temperature, 0.0, 1e6),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "top_k": (sampling.top_k, 0, _INT64 - 1),
        "seed": (sampling.seed, -_INT64, _INT64 - 1),
        "presence_penalty": (sampling.presence_penalty, -1e6, 1e6),
        "frequency_penalty": (sampling.frequency_penalty, -1e6, 1e6),
        "repetition_penalty": (sampling.repetition_penalty, 1e-6, 1e6),
        "min_tokens": (sampling.min_tokens, 0, _INT64 - 1),
        "num_logprobs": (sampling.num_logprobs or 0, 0, MAX_LOGPROBS),
        "num_prompt_logprobs": (sampling.num_prompt_logprobs or 0, 0, MAX_LOGPROBS),
        "thinking": (thinking, 0, _INT64 - 1),
        "weight": (request.weight, 1e-6, 1e6),
        "max_running": (request.max_running, 0, _INT64 - 1),
        "priority": (request.priority, -_INT64, _INT64 - 1),
        "cache_ttl": (request.cache_ttl, 0.0, _MOST_SECONDS),
        "arrival_time": (request.arrival_time, -_MOST_SECONDS, _MOST_SECONDS),
        "deadline": (request.deadline or 0.0, -_MOST_SECONDS, _MOST_SECONDS),
        "service_elsewhere": (request.service_elsewhere, 0.0, 1e18),
        "kv_source": (0.0 if request.kv_source is None else request.kv_source.own_seconds, 0.0, _MOST_SECONDS),
        "beam.width": (1 if beam is None else beam.width, 1, MOST_CHOICES),
        "beam.length_penalty": (0.0 if beam is None else beam.length_penalty, -1e6, 1e6),
    }
    yield from (f"{name}={value!r}" for name, (value, least, most) in bounds.items() if not least <= value <= most)
    if any(not math.isfinite(bias) for _, bias in sampling.logit_bias):
        yield "a bias that is no finite number"
    if max(len(request.tenant), len(request.cache_salt)) > _MOST_NAME or len(sampling.grammar) > _MOST_GRAMMAR:
        yield "a name or a grammar that is too long"
