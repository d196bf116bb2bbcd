"""The one model of everything an operator can set: flags, `QUIRE_*` variables and YAML keys are its fields.

Promises: a `Settings` that exists is possible; every message names the setting and a value that would work.
Must not know: torch, HTTP, what the settings are used for beyond their limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from quire_engine.config import (
    AsyncScheduling,
    AttentionChoice,
    Device,
    DType,
    EngineConfig,
    KernelChoice,
    KVCacheDType,
    Quantization,
)
from quire_engine.demo import demo_model_path
from quire_engine.errors import ConfigError
from quire_engine.limits import LIMIT_NAMES, PolicyName, SchedulerLimits, out_of_range
from quire_server.settings.sources import ENV_PREFIX, SettingsError, check_environment, explain, read_config, with_flags
from quire_server.settings.values import (
    BlockSize,
    Count,
    JsonObject,
    Names,
    OptionalCount,
    Positive,
    PositiveSeconds,
    Seconds,
    Size,
    Strings,
)

DEMO_MODEL = "quire-demo"
LIMITS = SchedulerLimits()  # the defaults; what the values may be is checked by the record too
GROUPS = ("Model", "Memory", "Scheduling", "Listening", "Limits", "Streaming", "Lifetime", "Observing")

T = TypeVar("T")


def _option(default: T, group: str, description: str, unit: str = "", *, secret: bool = False) -> T:
    """A field with the group and unit that `--help` and the documents show; a secret is never printed."""
    extra: JsonDict = {"group": group, "unit": unit}
    return Field(default, description=description, json_schema_extra=extra, repr=not secret)


class Settings(BaseSettings):
    """Every setting of `quire serve`. Precedence: flag, environment, `--config` file, default."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    # -- Model
    model: str = _option(DEMO_MODEL, "Model", "directory of a Hugging Face checkpoint, or the embedded quire-demo")
    served_model_name: Names = _option(
        (), "Model", "names clients may use, the first is reported; default: the model's directory name"
    )
    tokenizer: str | None = _option(None, "Model", "directory of the tokenizer, when it is not the model's")
    device: Device = _option("auto", "Model", "where the model runs; auto takes a GPU where there is one")
    dtype: DType = _option("auto", "Model", "type of weights and KV cache; auto is the checkpoint's own")
    kernels: KernelChoice = _option("auto", "Model", "implementation of the model's operations")
    attention: AttentionChoice = _option(
        "auto",
        "Model",
        "who computes attention on a GPU: our kernels (auto, triton) or an installed library (flash-attn)",
    )
    quantization: Quantization | None = _option(
        None, "Model", "weights held as int8 or int4, converted at load; C++ kernels on a CPU only"
    )
    kv_cache_dtype: KVCacheDType = _option(
        "auto",
        "Model",
        "type of the KV cache: the model's, int8 (C++ kernels) or fp8 (Triton kernels)"
        " with a scale for every token and head",
    )
    deterministic: bool = _option(
        False,
        "Model",
        "a request gets the same bits alone and in any batch; costs speed on a GPU, on a CPU it is always so",
    )
    num_threads: Positive | None = _option(None, "Model", "CPU compute threads; default: all usable cores")
    max_model_len: OptionalCount = _option(
        None, "Model", "longest prompt + output; 8k is 8000, 8K is 8192; default: the model's own", "tokens"
    )
    max_logprobs: Annotated[int, Field(ge=0, le=20)] = _option(
        20, "Model", "most alternatives per token a client may ask for"
    )
    seed: int | None = _option(
        None, "Model", "seed of requests that bring none: the same prompt gets the same answer; default: random"
    )
    chat_template: Path | None = _option(None, "Model", "Jinja file used instead of the model's chat template")
    default_chat_template_kwargs: JsonObject = _option(
        {}, "Model", "variables of the chat template; a request's own win; JSON object"
    )
    tool_call_parser: str = _option(
        "auto", "Model", "how the model writes calls of tools; auto: by its chat template; see the table of formats"
    )
    reasoning_parser: str = _option(
        "auto", "Model", "how the model marks its thoughts; auto: by its chat template; none: they are text"
    )
    pooling: Literal["auto", "last", "mean", "none"] = _option(
        "auto",
        "Model",
        "what makes a text's vector: its last token or the mean of all, none refuses; auto: as the checkpoint says,"
        " else last",
    )

    # -- Memory
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = _option(
        0.9, "Memory", "share of the GPU's memory for weights, workspace and KV cache; unused on a CPU"
    )
    kv_memory: Size | None = _option(
        None, "Memory", "size of the KV cache, such as 2GiB; default: from what is free", "bytes"
    )
    block_size: BlockSize = _option(
        LIMITS.block_size, "Memory", "tokens per KV block: 16, 32, 64, 128 or 256", "tokens"
    )
    enable_prefix_caching: bool = _option(
        LIMITS.enable_prefix_caching, "Memory", "reuse the KV blocks of equal prompt beginnings"
    )

    # -- Scheduling
    max_num_seqs: int = _option(LIMITS.max_num_seqs, "Scheduling", "sequences computed in one step at most")
    max_num_batched_tokens: Count = _option(
        LIMITS.max_num_batched_tokens, "Scheduling", "tokens computed in one step at most", "tokens"
    )
    prefill_chunk: Count = _option(
        LIMITS.prefill_chunk, "Scheduling", "tokens of one prompt computed in one step at most", "tokens"
    )
    itl_target: float = _option(
        LIMITS.itl_target,
        "Scheduling",
        "prompts beside running streams are computed in steps of about this time; 0 is any",
        "s",
    )
    max_num_partial_prefills: int = _option(
        LIMITS.max_num_partial_prefills, "Scheduling", "sequences that may be in the middle of their prompt at once"
    )
    min_chunk: int = _option(
        LIMITS.min_chunk, "Scheduling", "the oldest request's claim on each step, before all others", "tokens"
    )
    max_bypasses: int = _option(
        LIMITS.max_bypasses, "Scheduling", "times a request that waits for memory may be overtaken by smaller ones"
    )
    elder_age_steps: int = _option(
        LIMITS.elder_age_steps, "Scheduling", "age from which a waiting request is overdue and served first", "steps"
    )
    scheduling_policy: PolicyName = _option(
        LIMITS.scheduling_policy, "Scheduling", "order of waiting requests; priority: lower first"
    )
    async_scheduling: AsyncScheduling = _option(
        "auto", "Scheduling", "plan each step while the one before it is computed; auto: on a GPU"
    )
    max_num_queued_reqs: Annotated[int, Field(ge=0)] = _option(
        256, "Scheduling", "choices that may wait beyond the --max-num-seqs that run; more get 429"
    )
    max_num_queued_tokens: OptionalCount = _option(
        None, "Scheduling", "prompt tokens accepted and unfinished; more get 429; default: no limit", "tokens"
    )

    # -- Listening
    host: str = _option("127.0.0.1", "Listening", "address to listen on; 0.0.0.0 is all interfaces")
    port: Annotated[int, Field(ge=0, le=65535)] = _option(8000, "Listening", "TCP port; 0 takes a free one")
    uds: Path | None = _option(None, "Listening", "Unix socket to listen on, instead of host and port")
    api_key: Strings = _option(
        (), "Listening", "keys of which every client must bring one; default: none needed", secret=True
    )
    allowed_origins: Strings = _option((), "Listening", "origins browsers may call from (CORS); * is any")
    timeout_keep_alive: PositiveSeconds = _option(
        75.0, "Listening", "an idle connection is kept this long; more than the proxy in front does", "s"
    )

    # -- Limits
    max_body_bytes: Size = _option(8 * 2**20, "Limits", "largest request body, else 413", "bytes")
    max_header_bytes: Size = _option(32 * 2**10, "Limits", "largest request head, else 431", "bytes")
    max_headers: Positive = _option(100, "Limits", "most header lines of a request, else 431")
    max_connections: Positive = _option(1024, "Limits", "open connections, further ones are answered 503")
    header_timeout: PositiveSeconds = _option(10.0, "Limits", "time to send a request's head", "s")
    body_timeout: PositiveSeconds = _option(30.0, "Limits", "time to send a request's body, else 408", "s")
    strict: bool = _option(
        False, "Limits", "refuse fields without effect, such as unknown ones, instead of naming them"
    )

    # -- Streaming
    stream_interval: Positive = _option(1, "Streaming", "tokens per streamed chunk; the first comes at once", "tokens")
    sse_keep_alive_interval: Seconds = _option(
        15.0, "Streaming", "a silent stream gets a comment line this often; 0 is never", "s"
    )

    # -- Lifetime
    drain_timeout: Seconds = _option(30.0, "Lifetime", "after SIGTERM, running requests get this long to finish", "s")
    max_engine_restarts: Annotated[int, Field(ge=0)] = _option(
        5, "Lifetime", "engine restarts within the window before giving up with exit code 70"
    )
    engine_restart_window: PositiveSeconds = _option(600.0, "Lifetime", "the window of --max-engine-restarts", "s")

    # -- Observing
    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "Observing", "least level logged")
    log_format: Literal["text", "json"] = _option("text", "Observing", "json is one object per line")
    log_stats_interval: Seconds = _option(
        10.0, "Observing", "a line with throughput, queue and cache this often when active; 0 is never", "s"
    )
    enable_log_requests: bool = _option(False, "Observing", "log each request's parameters, never its text")
    disable_access_log: bool = _option(False, "Observing", "no line per HTTP request")
    enable_vllm_metric_names: bool = _option(True, "Observing", "also export metrics under their vllm: names")
    check_invariants: bool = _option(False, "Observing", "audit the scheduler after every step, not only when idle")
    dry_run: bool = _option(False, "Observing", "print the memory plan and exit")
    config: Path | None = _option(None, "Observing", "YAML file with any of these settings")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags win over the environment, which wins over the file that either of them names."""
        del dotenv_settings, file_secret_settings
        path = init_settings().get("config") or env_settings().get("config")
        return (
            init_settings,
            env_settings,
            InitSettingsSource(settings_cls, read_config(Path(path), settings_cls.model_fields) if path else {}),
        )

    @field_validator(*LIMIT_NAMES)
    @classmethod
    def _check_limit(cls, value: object, info: ValidationInfo) -> object:
        wrong = out_of_range(str(info.field_name), value)
        if wrong is not None:
            raise ValueError(wrong)
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        try:
            self.limits.check()
        except ConfigError as error:
            raise ValueError(with_flags(str(error))) from None
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ValueError(f"there is no chat template at {self.chat_template}; set --chat-template to a Jinja file")
        if any(not key for key in self.api_key):
            raise ValueError("an API key is empty; give --api-key a non-empty value or leave it out")
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use; the first is the one replies carry."""
        if self.served_model_name:
            return self.served_model_name
        return (DEMO_MODEL if self.model == DEMO_MODEL else Path(self.model).resolve().name,)

    @property
    def model_path(self) -> Path:
        """The checkpoint's directory."""
        return demo_model_path() if self.model == DEMO_MODEL else Path(self.model)

    @property
    def limits(self) -> SchedulerLimits:
        """The settings that are limits of the scheduler: a field of each name there is one here."""
        return SchedulerLimits(**{name: getattr(self, name) for name in LIMIT_NAMES})

    def engine_config(self) -> EngineConfig:
        """What the engine is asked for; it resolves the rest against the model and the machine."""
        return EngineConfig(
            model=str(self.model_path),
            tokenizer=self.tokenizer or "",
            device=self.device,
            dtype=self.dtype,
            kernels=self.kernels,
            attention=self.attention,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            deterministic=self.deterministic,
            max_model_len=self.max_model_len,
            limits=self.limits,
            kv_memory=self.kv_memory,
            gpu_memory_utilization=self.gpu_memory_utilization,
            num_threads=self.num_threads,
            async_scheduling=self.async_scheduling,
            check_invariants=self.check_invariants,
        )


def load_settings(flags: Mapping[str, object]) -> Settings:
    """The settings that flags (by field name), environment and file give together. Raises SettingsError."""
    check_environment(Settings.model_fields)
    values: dict[str, Any] = dict(flags)
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError(*(explain(problem, flags) for problem in error.errors())) from None
