"""The common JSON parts of replies in OpenAI's dialects: head, usage, end of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import Adapter
from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Generation, Usage
from quire_server.answering.options import ReplyOptions
from quire_server.http.sse import DONE
from quire_server.metrics.request_record import RequestSummary
from quire_server.showing.version import VERSION

encode = msgspec.json.Encoder().encode
PLAIN_END = b',"logprobs":null,"finish_reason":null}]'


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """The fields that are the same in every part of a reply."""

    id: str  # without the dialect's prefix
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str

    def encoded(self, prefix: str, kind: str) -> bytes:
        """The fields as the beginning of a JSON object, without the closing brace."""
        fields = {
            "id": prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return encode(fields)[:-1]


def fingerprint(plan: EnginePlan, adapter: Adapter | None = None) -> str:
    """The system fingerprint: changes with version, model, device, types, kernels or adapter, as answers might.

    It has the model's name without its folder, so that equal servers have equal fingerprints.
    """
    model, machine = plan.model, plan.machine
    identity = (
        *(VERSION, Path(model.path).name, model.architecture, model.num_parameters),
        *(machine.device, model.dtype, machine.kernels, machine.cpu_variant, model.quantization, plan.pool.dtype),
        machine.deterministic,
        *(() if adapter is None else (adapter.digest,)),
    )
    return "fp_" + hashlib.sha256(repr(identity).encode()).hexdigest()[:12]


def closing_fields(logprobs: object, delta: ChoiceDelta) -> dict[str, object]:
    """The fields of a streamed choice after its text."""
    fields: dict[str, object] = {"logprobs": logprobs, "finish_reason": delta.finish_reason}
    if delta.finish_reason is not None:
        fields["stop_reason"] = delta.stop_reason
    return fields | score_field(delta)


def score_field(delta: ChoiceDelta) -> dict[str, object]:
    """The field `beam_score` of a choice from beam search; empty for others."""
    return {} if delta.beam_score is None else {"beam_score": delta.beam_score}


def ending(start: bytes, options: ReplyOptions, generation: Generation) -> bytes:
    """The end of a stream: the usage, if it was requested, and the end mark."""
    if not options.usage_at_end:
        return DONE
    told = usage_field(generation.usage) + timings_field(options, generation)
    return start + b',"choices":[]' + told + b"}\n\n" + DONE


def progress_frames(generation: Generation, num_choices: int, start: bytes, middle: bytes) -> bytes:
    """Frames for the news of prompts since the last call: each as a frame of its first choice that has no token.

    `num_choices`: of each prompt. `start`: the bytes before the choice's index. `middle`: those between index and end.
    """
    if not generation.prompt_news:
        return b""
    news, generation.prompt_news = generation.prompt_news, []
    frames = b""
    for each in news:
        progress = {
            "total": each.total,
            "cache": each.cached,
            "processed": each.computed,
            "time_ms": round(1e3 * each.seconds, 3),
        }
        index = each.prompt * num_choices
        frames += b'%b%d%b%b,"prompt_progress":%b}\n\n' % (start, index, middle, PLAIN_END, encode(progress))
    return frames


def timings_field(options: ReplyOptions, generation: Generation) -> bytes:
    """The `timings` of a reply that is whole now, or nothing if they were not requested."""
    return b',"timings":' + encode(timings_of(generation.summaries())) if options.timings else b""


def last_timings(options: ReplyOptions, generation: Generation, *, is_last: bool) -> bytes:
    """Return `timings_field` for the frame that ends a stream, or nothing where a frame with the usage follows."""
    return timings_field(options, generation) if is_last and generation.finished and not options.usage_at_end else b""


def usage_field(usage: Usage, completion_tokens: int | None = None) -> bytes:
    """`completion_tokens`: tokens of the reply so far; None: all of them."""
    if completion_tokens is None:
        completion_tokens = usage.completion_tokens
    counts, details = [], b""
    if usage.reasoning_tokens is not None:
        counts.append(b'"reasoning_tokens":%d' % usage.reasoning_tokens)
    if usage.accepted_tokens is not None:
        counts.append(b'"accepted_prediction_tokens":%d' % usage.accepted_tokens)
        counts.append(b'"rejected_prediction_tokens":%d' % usage.rejected_tokens)
    if counts:
        details = b',"completion_tokens_details":{%b}' % b",".join(counts)
    return (
        b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}%b}'
    ) % (
        usage.prompt_tokens,
        completion_tokens,
        usage.prompt_tokens + completion_tokens,
        usage.cached_tokens,
        details,
    )


def timings_of(summaries: Sequence[RequestSummary]) -> dict[str, int | float | None]:
    """The counts of a request's prompts and choices together, and the times of the one that took longest.

    Milliseconds. A rate is None where its time is too short to be told. `queue_ms` is ours; the others are
    llama-server's, of which `prompt_n` leaves out the `cache_n` tokens of the prompt that were cached.
    """
    cached = sum(each.cached_tokens for each in summaries)
    prompt = sum(each.prompt_tokens for each in summaries) - cached
    predicted = sum(each.output_tokens for each in summaries)
    prompt_ms = 1e3 * max((each.prefill_seconds or 0.0 for each in summaries), default=0.0)
    decodes = [each.last - each.first for each in summaries if each.first is not None and each.last is not None]
    predicted_ms = 1e3 * max(0.0, *decodes) if decodes else 0.0
    queue_ms = 1e3 * max((each.queue_seconds or 0.0 for each in summaries), default=0.0)
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": _ratio(prompt_ms, prompt),
        "prompt_per_second": _ratio(1e3 * prompt, prompt_ms),
        "predicted_n": predicted,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": _ratio(predicted_ms, predicted),
        "predicted_per_second": _ratio(1e3 * predicted, predicted_ms),
        "queue_ms": round(queue_ms, 3),
    }


def _ratio(value: float, by: float) -> float | None:
    return round(value / by, 3) if by else None
