"""The one model of everything an operator can set: flags, `QUIRE_*` variables and YAML keys are its fields.

Promises: a `Settings` that exists is possible; every message names the setting and a value that would work.
Must not know: torch, HTTP, what the settings are used for beyond their limits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.config import JsonDict
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from quire_engine.config import Device, DType, EngineConfig, KernelChoice, KVCacheDType, PolicyName, Quantization
from quire_engine.demo import demo_model_path

DEMO_MODEL = "quire-demo"
ENV_PREFIX = "QUIRE_"
GROUPS = ("Model", "Memory", "Scheduling", "Listening", "Limits", "Streaming", "Lifetime", "Observing")

T = TypeVar("T")

# A Kubernetes service called "quire" injects QUIRE_PORT=tcp://... and QUIRE_SERVICE_HOST into every pod beside it.
_SERVICE_LINK = re.compile(r"QUIRE_(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*)")


class SettingsError(Exception):
    """Settings that cannot be used. One readable line per problem."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def _split(value: object) -> object:
    """`a,b` and `["a", "b"]` from the environment; lists from flags and YAML pass."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _parse_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("expected a JSON object such as '{\"enable_thinking\": false}'") from None


_COUNT_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _parse_count(value: object) -> object:
    """`8k` is 8000 and `8K` is 8192, as elsewhere; `auto` is None."""
    if not isinstance(value, str):
        return value
    if value == "auto":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", value.strip())
    if match is None:
        raise ValueError("expected a number of tokens such as 4096, 4k (4000) or 4K (4096)")
    return int(float(match[1]) * _COUNT_SUFFIX.get(match[2], 1))


_SIZE_UNIT = {"": 1, "b": 1} | {
    f"{letter}{suffix}": (1000 if suffix == "b" else 1024) ** power
    for power, letter in enumerate("kmgt", start=1)
    for suffix in ("", "b", "ib")
}


def _parse_size(value: object) -> object:
    """`2GiB` and `2G` are 2 * 2**30 bytes, `2GB` is 2 * 10**9; case does not matter."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
    if match is None or match[2] not in _SIZE_UNIT:
        raise ValueError("expected a size such as 512MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * _SIZE_UNIT[match[2]])


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._/:-]{1,96}", name):
        raise ValueError("names are 1 to 96 characters of A-Z a-z 0-9 . _ - / :")
    return name


def _check_block_size(size: int) -> int:
    if size not in {8, 16, 32, 64, 128}:
        raise ValueError("block sizes are 8, 16, 32, 64 or 128 tokens; 16 suits most models")
    return size


Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Names = Annotated[tuple[Annotated[str, AfterValidator(_check_name)], ...], NoDecode, BeforeValidator(_split)]
JsonObject = Annotated[dict[str, object], NoDecode, BeforeValidator(_parse_json)]
Count = Annotated[int, BeforeValidator(_parse_count), Field(gt=0)]
OptionalCount = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_parse_count)]
Size = Annotated[int, BeforeValidator(_parse_size), Field(gt=0)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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
    quantization: Quantization | None = _option(
        None, "Model", "weights held as int8 or int4, converted at load; C++ kernels on a CPU only"
    )
    kv_cache_dtype: KVCacheDType = _option(
        "auto", "Model", "type of the KV cache: the model's, or int8 with a scale for every token and head; CPU only"
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

    # -- Memory
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = _option(
        0.9, "Memory", "share of the GPU's memory for weights, workspace and KV cache; unused on a CPU"
    )
    kv_memory: Size | None = _option(
        None, "Memory", "size of the KV cache, such as 2GiB; default: from what is free", "bytes"
    )
    block_size: Annotated[int, AfterValidator(_check_block_size)] = _option(
        16, "Memory", "tokens per KV block: 8, 16, 32, 64 or 128", "tokens"
    )
    enable_prefix_caching: bool = _option(True, "Memory", "reuse the KV blocks of equal prompt beginnings")

    # -- Scheduling
    max_num_seqs: Positive = _option(64, "Scheduling", "sequences computed in one step at most")
    max_num_batched_tokens: Count = _option(512, "Scheduling", "tokens computed in one step at most", "tokens")
    prefill_chunk: Count = _option(512, "Scheduling", "tokens of one prompt computed in one step at most", "tokens")
    itl_target: Seconds = _option(
        0.1, "Scheduling", "prompts beside running streams are computed in steps of about this time; 0 is any", "s"
    )
    max_num_partial_prefills: Positive = _option(
        2, "Scheduling", "sequences that may be in the middle of their prompt at once"
    )
    min_chunk: Positive = _option(
        16, "Scheduling", "the oldest request's claim on each step, before all others", "tokens"
    )
    max_bypasses: Annotated[int, Field(ge=0)] = _option(
        8, "Scheduling", "times a request that waits for memory may be overtaken by smaller ones"
    )
    elder_age_steps: Positive = _option(
        64, "Scheduling", "age from which a waiting request is overdue and served first", "steps"
    )
    scheduling_policy: PolicyName = _option("fcfs", "Scheduling", "order of waiting requests; priority: lower first")
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
        return init_settings, env_settings, InitSettingsSource(settings_cls, read_config(Path(path)) if path else {})

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_num_seqs + self.min_chunk > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) + min_chunk ({self.min_chunk}) must fit in max_num_batched_tokens"
                f" ({self.max_num_batched_tokens}): every running sequence and the oldest prompt advance in each step;"
                f" set --max-num-batched-tokens {self.max_num_seqs + self.min_chunk} or more, or --max-num-seqs"
                f" {max(1, self.max_num_batched_tokens - self.min_chunk)} or less"
            )
        if self.min_chunk > self.prefill_chunk:
            raise ValueError(
                f"min_chunk ({self.min_chunk}) is larger than prefill_chunk ({self.prefill_chunk});"
                f" set --prefill-chunk {self.min_chunk} or more, or --min-chunk {self.prefill_chunk} or less"
            )
        if self.kernels == "cpu" and self.device == "cuda":
            raise ValueError("the cpu kernels do not run on a GPU; set --kernels auto or --device cpu")
        if self.device == "cuda" and (self.quantization or self.kv_cache_dtype != "auto"):
            raise ValueError("int8 and int4 need the C++ kernels of a CPU; leave them out or set --device cpu")
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

    def engine_config(self) -> EngineConfig:
        """What the engine is asked for; it resolves the rest against the model and the machine."""
        return EngineConfig(
            model=str(self.model_path),
            device=self.device,
            dtype=self.dtype,
            kernels=self.kernels,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk=self.prefill_chunk,
            itl_target=self.itl_target,
            max_partial_prefills=self.max_num_partial_prefills,
            min_chunk=self.min_chunk,
            max_bypasses=self.max_bypasses,
            elder_age_steps=self.elder_age_steps,
            block_size=self.block_size,
            kv_memory=self.kv_memory,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.scheduling_policy,
            num_threads=self.num_threads,
            check_invariants=self.check_invariants,
        )


def read_config(path: Path) -> dict[str, object]:
    """The settings of a YAML file; keys in kebab-case or snake_case."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"--config {path}: expected `name: value` lines such as `port: 8000`")
    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    if "config" in named:
        raise SettingsError(f"--config {path}: a configuration file cannot name another one; remove `config`")
    unknown = [key for key in named if key not in Settings.model_fields]
    if unknown:
        raise SettingsError(*(f"--config {path}: unknown setting {key!r}{suggest(key)}" for key in unknown))
    return {key: value for key, value in named.items() if value is not None}


def load_settings(flags: Mapping[str, object]) -> Settings:
    """The settings that flags (by field name), environment and file give together. Raises SettingsError."""
    unknown = [
        name
        for name in os.environ
        if name.startswith(ENV_PREFIX)
        and name.removeprefix(ENV_PREFIX).lower() not in Settings.model_fields
        and not _SERVICE_LINK.fullmatch(name)
    ]
    if unknown:
        raise SettingsError(*(f"unknown environment variable {name}{suggest(name, ENV_PREFIX)}" for name in unknown))
    if os.environ.get("QUIRE_PORT", "").startswith("tcp://"):
        raise SettingsError(
            "QUIRE_PORT is a Kubernetes service link, not a port; set enableServiceLinks: false in the pod"
            " or give the service another name"
        )
    values: dict[str, Any] = dict(flags)
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError(*(_explain(problem, flags) for problem in error.errors())) from None


def flag_name(field: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + field.replace("_", "-")


def suggest(name: str, prefix: str = "") -> str:
    """A did-you-mean for a name that is no setting, in the spelling of the source it came from."""
    bare = name.removeprefix(prefix).removeprefix("--").replace("-", "_").lower()
    candidates = [*Settings.model_fields, *_NAMED_ELSEWHERE]
    close = get_close_matches(bare, candidates, n=1, cutoff=0.7)
    if not close:
        return "; `quire serve --help` lists all"
    field = _NAMED_ELSEWHERE.get(close[0], close[0])
    if prefix:
        return f"; did you mean {prefix}{field.upper()}?"
    return f"; did you mean {flag_name(field) if name.startswith('--') else field}?"


# What other servers call some of our settings.
_NAMED_ELSEWHERE = {
    "shutdown_timeout": "drain_timeout",
    "uvicorn_log_level": "log_level",
    "disable_uvicorn_access_log": "disable_access_log",
    "kv_cache_memory_bytes": "kv_memory",
    "long_prefill_token_threshold": "prefill_chunk",
    "chunked_prefill_size": "prefill_chunk",
    "max_running_requests": "max_num_seqs",
    "max_queued_requests": "max_num_queued_reqs",
    "context_length": "max_model_len",
    "model_path": "model",
    "mem_fraction_static": "gpu_memory_utilization",
    "schedule_policy": "scheduling_policy",
}


def _explain(problem: ErrorDetails, flags: Mapping[str, object]) -> str:
    """One validation problem in the spelling of the source the value came from."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    field = str(problem["loc"][0])
    variable = ENV_PREFIX + field.upper()
    if field in flags:
        source = flag_name(field)
    elif variable in os.environ:
        source = variable
    else:
        source = f"{field} in the configuration file"
    given = "" if field == "api_key" else f" (got {str(problem['input'])[:80]!r})"
    return f"{source}: {message[:1].lower()}{message[1:]}{given}"
