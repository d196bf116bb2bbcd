"""The servers under load: what they say about themselves, and how a request reaches them.

Promises: works with any server that has /v1/completions with token ids; what else a server tells is a bonus.
"""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from quire_bench.client import Client
from quire_bench.load import closed_loop, open_loop
from quire_bench.records import Record, Run
from quire_bench.workload import Job, LoadPoint

_QUESTION_SECONDS = 10.0
_SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class BenchError(Exception):
    """The benchmark cannot be run; one readable line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server that is there already."""

    url: str
    name: str | None

    @classmethod
    def parse(cls, text: str) -> Peer:
        """A peer as `--against URL[,NAME]` gives it."""
        url, _, name = text.partition(",")
        return cls(url=url, name=name or None)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a Quire server tells about its model; enough to count bytes and operations."""

    architecture: str
    parameters: int
    layer_parameters: int  # multiplied with every token
    sampled_parameters: int  # and these with every token whose logits are needed
    layer_attention: int
    sampled_attention: int
    read_bytes: int  # weights, for one token alone
    weight_type: str  # int8 or int4 where weights are quantized, else the dtype
    kv_bytes_per_token: float
    device: str
    kernels: str
    num_threads: int
    cpu_variant: str = ""  # instruction set of the C++ kernels; empty: others serve, or it does not tell

    @property
    def machine(self) -> str:
        """The name of that which the limits belong to: the device, and on a CPU the instructions that compute."""
        return f"{self.device} {self.cpu_variant}".rstrip()


class KvUse(msgspec.Struct, frozen=True, kw_only=True):
    """The savings by sharing and the cost of preemptions in a run of a Quire server; tokens but for the last two."""

    block_size: int
    looked_up: int  # prompt tokens, looked up in the prefix cache
    found: int  # of those
    computed: int
    recomputed: int  # of those, computed once before
    blocks_taken: int  # a block that is found is not taken
    preemptions: int

    @property
    def blocks_saved(self) -> int:
        """Blocks that were found, not taken and computed; what is found of half a block is left out."""
        return self.found // self.block_size

    def since(self, before: KvUse) -> KvUse | None:
        """The growth from an earlier look; None if the server was started anew in between."""
        grown = {name: getattr(self, name) - getattr(before, name) for name in _KV_COUNTERS}
        return None if min(grown.values()) < 0 else KvUse(block_size=self.block_size, **grown)


_KV_COUNTERS = {
    "looked_up": "quire_prefix_cache_query_tokens_total",
    "found": "quire_prefix_cache_hit_tokens_total",
    "computed": "quire_engine_computed_tokens_total",
    "recomputed": "quire_recomputed_tokens_total",
    "blocks_taken": "quire_kv_blocks_taken_total",
    "preemptions": "quire_preemptions_total",
}


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a server or baseline that are known before the first request."""

    name: str
    address: str
    model: str
    version: str = ""
    max_model_len: int | None = None
    vocab_size: int | None = None
    facts: ModelFacts | None = None


class Target(Protocol):
    """Something that answers requests: a server, or a baseline without one."""

    info: ServerInfo

    async def run(self, point: LoadPoint, jobs: Iterable[Job], seconds: float | None) -> Run:
        """All of `jobs`; a closed loop begins none after `seconds`."""
        ...

    async def kv_use(self) -> KvUse | None:
        """Counters so far; None from anything but a Quire server that shows its metrics."""
        ...

    async def close(self) -> None: ...


class Server:
    """A server behind a URL."""

    def __init__(
        self, info: ServerInfo, *, api_key: str | None, timeout: float, temperature: float, token_ids: bool = False
    ) -> None:
        self.info = info
        self._api_key = api_key
        self._client = Client(f"{info.address}/v1/completions", api_key=api_key, timeout=timeout)
        self._fields: dict[str, object] = {
            "model": info.model,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if token_ids:
            self._fields["return_token_ids"] = True

    async def run(self, point: LoadPoint, jobs: Iterable[Job], seconds: float | None) -> Run:
        if point.mode == "concurrency":
            return await closed_loop(self._send, jobs, streams=int(point.value), seconds=seconds)
        return await open_loop(self._send, jobs)

    async def kv_use(self) -> KvUse | None:
        if self.info.facts is None:
            return None
        return read_kv_use(await asyncio.to_thread(_optional_text, self.info.address + "/metrics", self._api_key))

    async def _send(self, job: Job, record: Record) -> None:
        body = msgspec.json.encode(self._fields | {"prompt": job.prompt, "max_tokens": job.output_tokens})
        await self._client.send(body, record)

    async def close(self) -> None:
        self._client.close()


async def discover(url: str, name: str | None, *, api_key: str | None, model: str | None) -> ServerInfo:
    """Ask a server who it is. Raises BenchError when it cannot be reached or serves nothing."""
    url = url.rstrip("/").removesuffix("/v1/completions").removesuffix("/v1")
    if not re.match(r"https?://[^/]", url):
        raise BenchError(f"{url}: expected an address such as http://127.0.0.1:8000")
    return await asyncio.to_thread(_discover, url, name, api_key, model)


def _discover(url: str, name: str | None, api_key: str | None, model: str | None) -> ServerInfo:
    try:
        listed = _json(url + "/v1/models", api_key).get("data")
    except OSError as error:
        raise BenchError(f"{url} does not answer: {error}") from None
    models = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    if not models:
        raise BenchError(f"{url}/v1/models lists no model")
    chosen = next((entry for entry in models if entry.get("id") == model), models[0])
    longest = chosen.get("max_model_len")
    vocab = _optional(url + "/tokenizer_info", api_key).get("vocab_size")
    version = _optional(url + "/version", api_key).get("version") or _optional(url + "/props", api_key).get(
        "build_info"
    )
    return ServerInfo(
        name=name or url.split("//")[1],
        address=url,
        model=model or str(chosen.get("id")),
        version=str(version or ""),
        max_model_len=longest if isinstance(longest, int) else None,
        vocab_size=vocab if isinstance(vocab, int) else None,
        facts=read_facts(_optional_text(url + "/metrics", api_key)),
    )


def _samples(metrics: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values by name."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in metrics.splitlines():
        if match := _SAMPLE.fullmatch(line):
            samples.setdefault(match[1], []).append((dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return samples


def read_kv_use(metrics: str) -> KvUse | None:
    """Read the KV use from a Quire server's metrics; None from others, and from versions that lack a counter."""
    samples = _samples(metrics)
    try:
        block_size = int(samples["quire_cache_config_info"][0][0]["block_size"])
        totals = {name: int(sum(value for _, value in samples[metric])) for name, metric in _KV_COUNTERS.items()}
    except (KeyError, IndexError):
        return None
    return KvUse(block_size=block_size, **totals)


def read_facts(metrics: str) -> ModelFacts | None:
    """Read the model's facts from a Quire server's metrics; None from others."""
    samples = _samples(metrics)

    def value(name: str, **labels: str) -> float:
        found = [sample for has, sample in samples[name] if labels.items() <= has.items()]
        return found[0]

    try:
        (model, _), (cache, _) = samples["quire_model_info"][0], samples["quire_cache_config_info"][0]
        quantization = model.get("quantization", "")
        return ModelFacts(
            architecture=model["architecture"],
            parameters=int(model["parameters"]),
            layer_parameters=int(value("quire_model_parameters", part="layers")),
            sampled_parameters=int(value("quire_model_parameters", part="sampled")),
            layer_attention=int(value("quire_model_attention_width", part="layers")),
            sampled_attention=int(value("quire_model_attention_width", part="sampled")),
            read_bytes=int(value("quire_model_read_bytes")),
            weight_type=quantization if quantization in {"int8", "int4"} else model["dtype"],
            kv_bytes_per_token=int(cache["bytes_per_block"]) / int(cache["block_size"]),
            device=model["device"],
            kernels=model["kernels"],
            num_threads=int(model["num_threads"]),
            cpu_variant="" if (variant := model.get("cpu_variant", "")) == "none" else variant,
        )
    except (KeyError, IndexError):
        return None


def _text(url: str, api_key: str | None) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would be measured, too
    with opener.open(request, timeout=_QUESTION_SECONDS) as reply:
        content: bytes = reply.read()
    return content.decode(errors="replace")


def _json(url: str, api_key: str | None) -> Mapping[str, object]:
    try:
        found = msgspec.json.decode(_text(url, api_key))
    except msgspec.MsgspecError:
        return {}
    return found if isinstance(found, dict) else {}


def _optional(url: str, api_key: str | None) -> Mapping[str, object]:
    try:
        return _json(url, api_key)
    except OSError:
        return {}


def _optional_text(url: str, api_key: str | None) -> str:
    try:
        return _text(url, api_key)
    except OSError:
        return ""
