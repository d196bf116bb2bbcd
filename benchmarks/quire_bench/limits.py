"""The limits of the machine, and the share of them that a server used.

Promises: limits are those of the device the server computes on, or unknown; measured anew in every round, and the best
counts, as a share of a bad moment would flatter. Must not know: tensors; a probe is a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from quire_bench.compare import Spread
from quire_bench.measures import Measures
from quire_bench.servers import ModelFacts, ServerInfo
from quire_bench.workload import LoadPoint, Workload
from quire_engine.own_modules import module_command

PROBES = {"cpu": "quire_kernels.cpu.probe", "cuda": "quire_engine.tools.gpu_limits"}  # by a plan's device
_PROBE_SECONDS = 600.0  # the first may have to compile


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that a probe prints. Operations count a multiply and an add as two; 0: none such, or not known."""

    variant: str  # instruction set of a CPU, name of a GPU
    threads: int  # or a GPU's multiprocessors
    fp32_per_second: float
    bf16_per_second: float
    int8_per_second: float
    fp16_per_second: float = 0.0
    read_bytes_per_second: float
    cache_bytes: int  # of the last level; 0: unknown
    fp32_instruction: str = ""  # whose rate it is, of a CPU
    bf16_instruction: str = ""
    int8_instruction: str = ""

    def best(self, other: Limits) -> Limits:
        return msgspec.structs.replace(
            self,
            fp32_per_second=max(self.fp32_per_second, other.fp32_per_second),
            bf16_per_second=max(self.bf16_per_second, other.bf16_per_second),
            int8_per_second=max(self.int8_per_second, other.int8_per_second),
            fp16_per_second=max(self.fp16_per_second, other.fp16_per_second),
            read_bytes_per_second=max(self.read_bytes_per_second, other.read_bytes_per_second),
        )

    def arithmetic(self, weight_type: str, device: str) -> float:
        """Operations per second for weights of this type; on a CPU without it those of fp32, on a GPU 0: unknown."""
        by_type = {
            "bfloat16": self.bf16_per_second,
            "float16": self.fp16_per_second,
            "int8": self.int8_per_second,
            "int4": self.int8_per_second,
            "float32": self.fp32_per_second,
        }
        return by_type.get(weight_type, 0.0) or (self.fp32_per_second if device == "cpu" else 0.0)

    def instruction(self, weight_type: str) -> str:
        """Return the instruction whose rate `arithmetic` gives on a CPU; empty where the probe did not say."""
        by_type = {"bfloat16": self.bf16_instruction, "int8": self.int8_instruction, "int4": self.int8_instruction}
        return by_type.get(weight_type, "") or self.fp32_instruction


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of the limits that were used, 0 to 1. None: not measured at this load."""

    arithmetic: float | None  # all tokens of the run
    prefill: float | None  # one prompt alone, by its time to first token
    decode_read: float | None  # one stream alone: weights and KV cache read per token


async def probe_limits(machine: str) -> Limits | str:
    """Measure one now, as `ModelFacts.machine` names it; nothing else should run. Or the reason why it cannot be."""
    device, _, variant = machine.partition(" ")
    process = await asyncio.create_subprocess_exec(
        *module_command(PROBES[device], *(("--cpu-variant", variant) if variant else ())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            out, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return "the probe does not end"
    if process.returncode:
        return (errors.decode(errors="replace").strip().splitlines() or ["the probe crashed"])[-1]
    return msgspec.json.decode(out, type=Limits)


def why_not_measurable(info: ServerInfo) -> str | None:
    """Why a server's limits cannot be known here; None where they can."""
    host = urlsplit(info.address).hostname or ""
    if info.facts is None:
        return "it does not tell its model's sizes"
    if host != "localhost" and not host.startswith("127."):
        return "it runs on another machine"
    return None if info.facts.device in PROBES else f"nothing here measures a device called {info.facts.device}"


def shares(point: LoadPoint, workload: Workload, measures: Measures, facts: ModelFacts, limits: Limits) -> Shares:
    """Return the shares that one run used. A shared prefix may come from the cache: then operations are not counted."""
    peak = limits.arithmetic(facts.weight_type, facts.device)
    counts = not workload.prefix and point.mode != "trace" and measures.ok > 0
    alone = point.mode == "concurrency" and point.value == 1 and counts
    inputs, outputs = measures.input_tokens / max(1, measures.ok), measures.output_tokens / max(1, measures.ok)
    arithmetic = prefill = decode_read = None
    if counts and peak:
        arithmetic = request_flop(facts, inputs, outputs) * measures.ok / measures.seconds / peak
    if alone and peak and measures.ttft_ms.p50:
        prefill = request_flop(facts, inputs, 1) / (measures.ttft_ms.p50 / 1e3) / peak
    read = token_bytes(facts, inputs + outputs / 2)
    # What fits in a cache is not read from memory.
    if alone and limits.read_bytes_per_second and measures.tpot_ms.p50 and read > 2 * limits.cache_bytes:
        decode_read = read / (measures.tpot_ms.p50 / 1e3) / limits.read_bytes_per_second
    return Shares(arithmetic=arithmetic, prefill=prefill, decode_read=decode_read)


def summarise_shares(rounds: Sequence[Shares]) -> dict[str, Spread]:
    """Return the spread of each kind of share that was measured, by its name."""
    found = {}
    for name in Shares.__struct_fields__:
        values = [value for one in rounds if (value := getattr(one, name)) is not None]
        if values:
            found[name] = Spread.of(values)
    return found


def request_flop(facts: ModelFacts, input_tokens: float, output_tokens: float) -> float:
    """Operations of one request alone: every token but the last is computed, to the end for each output only."""
    computed = input_tokens + output_tokens - 1
    looked_at = computed * (computed + 1) / 2  # a token looks at itself and all before it
    by_inputs = input_tokens * (input_tokens - 1) / 2  # of that, by all inputs but the last
    products = computed * facts.layer_parameters + output_tokens * facts.sampled_parameters
    attention = looked_at * facts.layer_attention + (looked_at - by_inputs) * facts.sampled_attention
    return 2 * products + 4 * attention


def token_bytes(facts: ModelFacts, context_tokens: float) -> float:
    """Read from memory for one token of one stream: each weight once, and the keys and values of its context."""
    return facts.read_bytes + context_tokens * facts.kv_bytes_per_token
