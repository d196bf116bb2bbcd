"""The common JSON parts of replies in OpenAI's dialects: head, usage, end of a stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from quire_engine.config import EnginePlan
from quire_engine.types import Adapter
from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Usage
from quire_server.answering.options import ReplyOptions
from quire_server.http.sse import DONE

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


_VERSION = version("quire")  # a constant, since it reads files


def fingerprint(plan: EnginePlan, adapter: Adapter | None = None) -> str:
    """The system fingerprint: changes with version, model, device, types, kernels or adapter, as answers might.

    It has the model's name without its folder, so that equal servers have equal fingerprints.
    """
    identity = (
        *(_VERSION, Path(plan.model).name, plan.architecture, plan.num_parameters),
        *(plan.device, plan.dtype, plan.kernels, plan.cpu_variant, plan.quantization, plan.kv_cache_dtype),
        plan.deterministic,
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


def ending(start: bytes, options: ReplyOptions, usage: Usage) -> bytes:
    """The end of a stream: the usage, if it was requested, and the end mark."""
    if not options.usage_at_end:
        return DONE
    return start + b',"choices":[]' + usage_field(usage) + b"}\n\n" + DONE


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
