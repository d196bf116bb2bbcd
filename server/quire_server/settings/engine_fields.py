"""The settings of a model, its memory and its schedule, shared by `quire serve` and a script's `LLM`.

Promises: a limit of the scheduler that is a setting has the default and the bounds of the scheduler's own record. Must
not know: torch, HTTP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from quire_engine.contract.config import (
    Device,
    DType,
    KVCacheDType,
    ModelImplementation,
    Quantization,
)
from quire_engine.contract.limits import LIMIT_NAMES, PolicyName, SchedulerLimits, out_of_range
from quire_server.settings.experiments import EngineExperiments
from quire_server.settings.values import (
    ClassShare,
    Count,
    JsonObject,
    LoraModules,
    Names,
    OffloadFolder,
    OptionalCount,
    PackedCache,
    Positive,
    PositiveSeconds,
    Size,
    Speculation,
    SwapSpace,
    option,
    synonym_of,
)

DEMO_MODEL = "quire-demo"
LIMITS = SchedulerLimits()  # the defaults; the record also checks the values


class EngineFields(EngineExperiments):
    """The first groups of `Settings`."""

    # -- Model
    model: str = option(
        DEMO_MODEL,
        "Model",
        "directory of a checkpoint, a GGUF file, the name of either on the Hub, the embedded quire-demo, or smollm2"
        " once fetched",
    )
    served_model_name: Names = option(
        (),
        "Model",
        "names clients may use, the first is reported; default: the model's directory or file name, or its name on the"
        " Hub, beside which the model as it was given is taken too",
    )
    tokenizer: str | None = option(None, "Model", "directory or name of the tokenizer, when it is not the model's")
    revision: str | None = option(None, "Model", "branch, tag or commit of a model on the Hub")
    download_dir: Path | None = option(
        None, "Model", "where models from the Hub are stored; default: the cache of huggingface_hub"
    )
    device: Device = option("auto", "Model", "where the model runs; auto takes a GPU where there is one")
    dtype: Annotated[DType, BeforeValidator(synonym_of("dtype"))] = option(
        "auto", "Model", "type of weights and KV cache; auto is the checkpoint's own, on a CPU bfloat16 for float16"
    )
    model_impl: Annotated[ModelImplementation, BeforeValidator(synonym_of("model_impl"))] = option(
        "auto", "Model", "model implementation: native (Quire), transformers, or auto (native if supported)"
    )
    quantization: Quantization | None = option(
        None, "Model", "weights held as int8 or int4, converted at load; C++ or Triton kernels"
    )
    kv_cache_dtype: Annotated[KVCacheDType, BeforeValidator(synonym_of("kv_cache_dtype"))] = option(
        "auto",
        "Model",
        "type of the KV cache: the model's, int8 (C++ kernels) or fp8 (Triton kernels)"
        " with a scale for every token and head",
    )
    deterministic: bool = option(
        False,
        "Model",
        "a request gets the same bits alone and in any batch; costs speed on a GPU, on a CPU it is always so",
    )
    num_threads: Positive | None = option(
        None, "Model", "CPU compute threads, of all ranks together; default: one for each usable core"
    )
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = option(
        1,
        "Model",
        "processes (ranks) that compute the model together, each some heads and columns; on a CPU or a GPU each",
    )
    max_model_len: OptionalCount = option(
        None, "Model", "longest prompt + output; 8k is 8000, 8K is 8192; default: the model's own", "tokens"
    )
    generation_config: Annotated[str, BeforeValidator(synonym_of("generation_config"))] = option(
        "auto",
        "Model",
        "sampling defaults: the model's generation_config.json (auto), OpenAI's (none) or a directory's file",
    )
    override_generation_config: JsonObject = option(
        {}, "Model", "values that override those of --generation-config; JSON object"
    )
    seed: int | None = option(
        None, "Model", "seed of requests without one, so that the same prompt gets the same answer; default: random"
    )
    chat_template: Path | None = option(
        None, "Model", "Jinja file used instead of the model's chat template, or the name of one of the model's"
    )
    default_chat_template_kwargs: JsonObject = option(
        {}, "Model", "variables of the chat template; a request's own win; JSON object"
    )
    tool_call_parser: str = option(
        "auto", "Model", "how the model writes calls of tools; auto: by its chat template; see Tools and thinking"
    )
    reasoning_parser: str = option(
        "auto",
        "Model",
        "how the model marks its thoughts; auto: by its chat template; none: thoughts are part of the text",
    )
    enable_lora: bool = option(False, "Model", "requests may name LoRA adapters instead of the model")
    lora_modules: LoraModules = option(
        (), "Model", "adapters to load at the start: name=directory, or JSON with name, path and base_model_name"
    )
    max_lora_rank: Positive = option(16, "Model", "largest rank of an adapter's matrices")
    pooling: Literal["auto", "last", "mean", "yes-no", "none"] = option(
        "auto",
        "Model",
        "what makes vectors; yes-no scores pairs; auto: the checkpoint's, else last",
    )

    # -- Memory
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = option(
        0.9, "Memory", "share of the GPU's memory for weights, workspace and KV cache; unused on a CPU"
    )
    kv_memory: Size | None = option(
        None, "Memory", "size of the KV cache, such as 2GiB; default: derived from the free memory", "bytes"
    )
    swap_space: SwapSpace = option(
        0,
        "Memory",
        "host memory for preempted requests and evicted prefixes, such as 8GiB; a number below 1024 is GiB; GPUs only",
        "bytes",
    )
    kv_offload_dir: OffloadFolder | None = option(
        None,
        "Memory",
        "DIR or DIR:SIZE in which prefixes are kept for the next start, the least recently used go first, at most 16GiB"
        " unless given; on a GPU those of the swap space",
    )
    packed_cache: PackedCache = option(
        "~/.cache/quire/packed:64GiB",
        "Memory",
        "DIR or DIR:SIZE, files of packed weights for the next start, the least recently used go first; off: none",
    )

    # -- Scheduling
    max_num_seqs: int = option(LIMITS.max_num_seqs, "Scheduling", "sequences computed in one step at most")
    max_num_batched_tokens: Count = option(
        LIMITS.max_num_batched_tokens, "Scheduling", "tokens computed in one step at most", "tokens"
    )
    prefill_chunk: Count = option(
        LIMITS.prefill_chunk, "Scheduling", "tokens of one prompt computed in one step at most", "tokens"
    )
    itl_target: float = option(
        LIMITS.itl_target,
        "Scheduling",
        "target time between tokens: prompts beside streams are computed in steps of this time; 0: no target",
        "s",
    )
    max_loras: int = option(
        LIMITS.max_loras, "Scheduling", "adapters of the sequences that are computed in one step at most"
    )
    scheduling_policy: PolicyName = option(
        LIMITS.scheduling_policy,
        "Scheduling",
        "order of waiting requests; wfq: fair shares of tenants and of short and long prompts; fcfs: by arrival;"
        " priority: lower first; lpm: longest cached prefix first; dlpm: the same, fairly among tenants",
    )
    class_share: ClassShare = option(
        LIMITS.class_share,
        "Scheduling",
        "least share of the tokens for a class that has more to compute, such as interactive=0.7,batch=0.1",
    )
    speculation: Speculation = option(
        "off",
        "Scheduling",
        "speculative decoding: suffix or auto (own text), outputs (earlier outputs), or model:DIR",
    )
    max_num_queued_reqs: Annotated[int, Field(ge=0)] = option(
        256, "Scheduling", "choices that may wait beyond the --max-num-seqs that run; more get 429"
    )
    max_num_queued_tokens: OptionalCount = option(
        None, "Scheduling", "prompt tokens accepted and unfinished; more get 429; default: no limit", "tokens"
    )
    slo_ttft: PositiveSeconds | None = option(
        None, "Scheduling", "requests whose first token would come later get 429; default: no limit", "s"
    )

    @field_validator(*LIMIT_NAMES, check_fields=False)  # not every limit is a setting
    @classmethod
    def _check_limit(cls, value: object, info: ValidationInfo) -> object:
        wrong = out_of_range(str(info.field_name), value)
        if wrong is not None:
            raise ValueError(wrong)
        return value
