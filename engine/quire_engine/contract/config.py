"""The engine's configuration as requested, `EngineConfig`, and the names that its fields may have.

Promises: a configuration never changes after it is made. Must not know: torch, flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire_engine.contract.limits import SchedulerLimits, scheduler_limits

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
ModelImplementation = Literal["auto", "native", "transformers"]
KernelChoice = Literal["auto", "reference", "cpu", "triton"]
# The instruction sets that the C++ kernels are compiled for; the kernels have the same list.
CpuVariant = Literal["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "neon_bf16", "portable"]
AttentionChoice = Literal["auto", "triton", "flash-attn"]
Quantization = Literal["int8", "int4"]
KVCacheDType = Literal["auto", "int8", "fp8"]
AsyncScheduling = Literal["auto", "on", "off"]
# What a front sends to a node: prompts alone, whose blocks another node fetches; requests whose long prompts such a
# node computes; or anything.
Role = Literal["prefill", "decode", "both"]
KVTransport = Literal["tcp", "nixl", "mooncake"]
# How next tokens are guessed: auto is suffix where that can be; or by a model, `model:` and its directory.
SPECULATIONS = ("off", "auto", "suffix", "outputs")
_BY_MODEL = "model:"
# The supported `architectures` of a config.json, here because early checks must not import torch.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3TextModel",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "MinistralForCausalLM",
    "Phi3ForCausalLM",
    "GraniteForCausalLM",
    "SmolLM3ForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "Glm4ForCausalLM",
    "GlmForCausalLM",
    "SeedOssForCausalLM",
    "Ernie4_5ForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Exaone4ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen2MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "FlexOlmoForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "AfmoeForCausalLM",
    "GptOssForCausalLM",
)
# The ends of names of models that are their families' without a head for tokens: classifiers, models of embeddings.
HEADLESS = ("ForSequenceClassification", "Model")

# The points of fault injection: a step, the engine process, its start, or the server's text processing.
FaultPoint = Literal[
    "step.raise",
    "step.hang",
    "step.nan",
    "alloc.fail",
    "oom",
    "engine.exit",
    "start.fail",
    "start.hang",
    "detok.raise",
    "grammar.hang",
    "template.hang",
    "ipc.garbage",
]
STEP_POINTS: tuple[FaultPoint, ...] = ("step.raise", "step.hang", "step.nan", "alloc.fail", "oom", "engine.exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An injected fault, for tests: each time, the nth time, or for requests with a seed."""

    point: FaultPoint
    nth: int = 0  # counted from 1 in the life of the server; 0: each time
    seed: int | None = None  # for points in a step: only requests with this seed


def faults_of_start(faults: tuple[Fault, ...], start: int) -> tuple[Fault, ...]:
    """The faults for the engine process of the server's `start`th start; an nth time comes in the first start only."""
    wanted = []
    for fault in faults:
        if fault.point.startswith("start."):
            if fault.nth in (0, start):
                wanted.append(Fault(point=fault.point))
        elif fault.nth == 0 or start == 1:
            wanted.append(fault)
    return tuple(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """The address at which an engine lends its KV blocks to others, and the files of the secrets of these links."""

    listen: str  # HOST:PORT
    reached_at: str = ""  # HOST:PORT by which others reach that; empty: the same
    cert: str = ""  # empty: no TLS
    key: str = ""
    ca: str = ""
    transport: KVTransport = "tcp"
    trusts_network: bool = False  # the network between the engines has no other users


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The operator's settings; `None` and "auto" are resolved by `build` into an `EnginePlan`."""

    model: str  # a directory
    tokenizer: str = ""  # a directory with tokenizer.json, for grammars; empty: the model's
    generation_config: str = ""  # a directory whose file names the tokens that end a text; empty: the tokenizer's
    ignore_config_keys: tuple[str, ...] = ()  # of config.json, that no family knows
    device: Device = "auto"
    dtype: DType = "auto"
    model_impl: ModelImplementation = "auto"  # auto: transformers' own code for models that have no entry of ours
    kernels: KernelChoice = "auto"
    cpu_variant: CpuVariant | None = None  # instruction set of the C++ kernels; None: the fastest, measured
    attention: AttentionChoice = "auto"  # on a GPU; auto: the kernels' own
    quantization: Quantization | None = None  # of the weights, at load
    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's dtype
    deterministic: bool = False  # on a GPU: a row's bits do not depend on its batch; on a CPU they never do
    trust_gpu_paths: bool = False  # take every optional path of a GPU's kernels unseen
    left_out_paths: tuple[str, ...] | None = None  # optional paths that must not serve; None: the GPU is to show them
    max_model_len: int | None = None
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    kv_memory: int | None = None  # bytes; overrides gpu_memory_utilization
    swap_space: int = 0  # bytes of host memory for preempted sequences and evicted prefixes
    swap_on_cpu: bool = False  # swap where pool and swap space are the same memory: for tests, it gains nothing
    kv_offload_dir: str = ""  # directory that keeps prefixes for the next start; empty: not kept
    kv_offload_size: int = 16 << 30  # bytes of these files on a CPU; on a GPU they are bounded by the swap space
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory; on a CPU the pool is a share of the free memory
    num_threads: int | None = None  # CPU compute threads, of all ranks; None: one for each usable core
    packed_cache: bool = True  # keep packed weights in files for the next start
    packed_cache_dir: str = "~/.cache/quire/packed"
    packed_cache_size: int = 64 << 30  # bytes of all such files
    async_scheduling: AsyncScheduling = "auto"  # plan a step while the one before it is computed; on a GPU only
    speculation: str = "off"  # one of SPECULATIONS or model:DIR, for steps that compute several tokens
    tensor_parallel_size: int = 1  # processes that compute the model together
    replicas: int = 1  # engines that share this machine's memory
    alive_seconds: float = 0.0  # between two signs of life that the process sends also during a step; 0: none
    enable_lora: bool = False  # requests may name adapters
    max_lora_rank: int = 16  # of an adapter's matrices
    max_cpu_loras: int | None = None  # adapters in memory; None: as many as run at once
    check_invariants: bool = False  # after every step, not only when idle
    learn: bool = False  # an operator may pause it, and let it compute step by step
    tells_prefixes: bool = False  # a router asks which prompt blocks are cached
    tells_blocks: bool = False  # events of the cache are published, with tokens
    kv_transfer: KVTransferConfig | None = None  # pass KV blocks on to other engines, and fetch theirs; None: neither
    role: Role = "both"  # what a front sends here
    row_seconds: tuple[tuple[int, float], ...] = ()  # of an earlier engine's plan; none: measure them
    faults: tuple[Fault, ...] = ()  # to be injected, for tests


def entry_of(architecture: str) -> str:
    """The name of the entry that would compute an architecture, be it one of ARCHITECTURES or not.

    >>> entry_of("Qwen3Model"), entry_of("Gemma3TextModel")
    ('Qwen3ForCausalLM', 'Gemma3TextModel')
    """
    end = next((end for end in HEADLESS if architecture.endswith(end)), "")
    if architecture in ARCHITECTURES or not end:
        return architecture
    return architecture.removesuffix(end) + "ForCausalLM"


def draft_model(speculation: str) -> str:
    """The directory in `model:DIR`; empty where no model guesses tokens."""
    return speculation.removeprefix(_BY_MODEL) if speculation.startswith(_BY_MODEL) else ""


def engine_config(plain: Mapping[str, Any]) -> EngineConfig:
    """The configuration from the JSON form of `dataclasses.asdict`."""
    faults = tuple(Fault(**fault) for fault in plain.get("faults", ()))
    ignored, left_out = tuple(plain.get("ignore_config_keys", ())), plain.get("left_out_paths")
    limits = scheduler_limits(plain["limits"])
    transfer = plain.get("kv_transfer")
    made = {
        "ignore_config_keys": ignored,
        "left_out_paths": None if left_out is None else tuple(left_out),
        "limits": limits,
        "faults": faults,
        "row_seconds": tuple((int(rows), float(seconds)) for rows, seconds in plain.get("row_seconds", ())),
        "kv_transfer": None if transfer is None else KVTransferConfig(**transfer),
    }
    return EngineConfig(**{**plain, **made})
