"""All settings as one model: flags, `QUIRE_*` variables and YAML keys are its fields.

Promises: a `Settings` object is consistent; every message names the setting and a value that would work. Must not know:
torch, HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from quire_engine.contract.config import EngineConfig, Fault, KVTransferConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import LIMIT_NAMES, SchedulerLimits, first_claim
from quire_engine.demo import demo_model_path
from quire_engine.plain_files import is_plain
from quire_server.settings.engine_fields import DEMO_MODEL, EngineFields
from quire_server.settings.experiments import EXPERIMENTS, SET, spelled, with_experiments
from quire_server.settings.faults import is_loopback, parse_faults
from quire_server.settings.keys import ApiKey, Keys, KeySources, TenantEntry
from quire_server.settings.node_fields import NodeFields
from quire_server.settings.server_fields import ServerFields
from quire_server.settings.sources import (
    ENV_PREFIX,
    SettingsError,
    check_environment,
    explain,
    flag_name,
    is_service_link,
    vllm_key,
    with_flags,
)
from quire_server.settings.values import offload_folder, packed_folder
from quire_server.settings.vllm import read_settings_file

GROUPS = (
    *("Model", "Memory", "Scheduling", "Listening", "Limits", "Streaming"),
    *("Lifetime", "Nodes", "Observing", "Experiments"),
)


def plain_fields(settings: type[BaseSettings]) -> dict[str, FieldInfo]:
    """The settings that are flags, variables and keys of their own: all but the experiments."""
    return {name: field for name, field in settings.model_fields.items() if name not in EXPERIMENTS}


class Settings(NodeFields, ServerFields, EngineFields, BaseSettings):
    """Every setting of `quire serve` and `quire engine`. Precedence: flag, environment, `--config` file, default."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags override the environment, which overrides the file that either of them names."""
        del dotenv_settings, file_secret_settings
        if isinstance(env_settings, EnvSettingsSource):
            own = {f"{ENV_PREFIX}{name}".lower() for name in EXPERIMENTS}  # which `set` alone has
            given = env_settings.env_vars
            env_settings.env_vars = {
                name: given[name]
                for name in given
                if name.lower() not in own and not is_service_link(name, given[name])
            }
        words, variables = init_settings(), env_settings()
        path = words.get("config") or variables.get("config")
        file = read_settings_file(Path(path), plain_fields(settings_cls))[0] if path else {}
        sources = (
            (words, f"--{SET}"),
            (variables, f"{ENV_PREFIX}{SET.upper()}:"),
            (vllm_key(), ""),
            (file, f"--config {path}: {SET}:"),
        )
        return tuple(InitSettingsSource(settings_cls, with_experiments(*source)) for source in sources)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if problems := list(self._wrong_combinations()):
            raise ValueError("\n".join(problems))
        return self

    def _wrong_combinations(self) -> Iterator[str]:
        try:
            self.limits.check()
        except ConfigError as error:
            yield with_flags(str(error), spelled)
        yield from self._wrong_files()
        yield from self._wrong_engines()
        if self.lora_modules and not self.enable_lora:
            yield "--lora-modules needs --enable-lora"
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            yield (
                f"--max-cpu-loras {self.max_cpu_loras} is less than the {self.max_loras} adapters that --max-loras lets"
                f" run at once; set --max-cpu-loras to {self.max_loras} or more"
            )
        names = [*self.model_names, *(each.name for each in self.lora_modules)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            yield f"the name {twice!r} stands for several models or adapters; change --lora-modules"
        if self.enable_fault_injection and self.uds is None and not is_loopback(self.host):
            yield (
                f"--set enable_fault_injection lets clients break the server, and --host {self.host} lets other"
                " machines in; set --host 127.0.0.1"
            )
        if self.role != "both" and self.kv_listen is None and self.listen is not None:
            yield f"--role {self.role} passes KV blocks on; set --kv-listen HOST:PORT too"

    def _wrong_engines(self) -> Iterator[str]:
        if self.engines and self.replicas > 1:
            yield "--engines and --replicas exclude each other: with nodes this server has no engine of its own"
        if self.learn and (self.engines or self.replicas > 1 or self.listen is not None):
            yield "--set learn pauses the one engine of a server; it excludes --engines, --replicas and nodes"

    def _wrong_files(self) -> Iterator[str]:
        if self.chat_template is not None and not is_plain(self.chat_template) and not _is_name(self.chat_template):
            yield f"there is no chat template at {self.chat_template}; set --chat-template to a Jinja file"
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            file = getattr(self, name)
            if file is not None and not is_plain(file):
                yield f"{flag_name(name)} {file}: there is no such file"
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            yield "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile, else nothing is encrypted"
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            yield "--ssl-cert-reqs needs --ssl-ca-certs, the authorities of client certificates"
        try:
            _ = self.first_keys  # reads and checks the files
        except (SettingsError, ValueError) as error:
            yield from str(error).split("\n")

    @property
    def key_sources(self) -> KeySources:
        """The flags and files of keys and tenants, which may be read again."""
        return KeySources(
            api=self.api_key,
            admin=self.admin_api_key,
            tenants_file=self.tenants,
        )

    @cached_property
    def first_keys(self) -> Keys:
        """The keys and tenants at the start; `http.credentials` has those of later."""
        return self.key_sources.read()

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """The keys at the start; if there are any, every client must send one of them."""
        return self.first_keys.api

    @property
    def admin_keys(self) -> tuple[ApiKey, ...]:
        """The keys for the operator's routes at the start."""
        return self.first_keys.admin

    @property
    def tenant_list(self) -> tuple[TenantEntry, ...]:
        """The tenants at the start; if there are any, every client must send a key of a tenant or one of `keys`."""
        return self.first_keys.tenants.tenants

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key. A file of keys or tenants is never empty, so no reload changes this."""
        return bool(self.keys or self.tenant_list)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that lists of models have; replies carry the first one.

        Requests may also use `checkpoint.locate.other_names`.
        """
        if self.served_model_name or self.model == DEMO_MODEL:
            return self.served_model_name or (DEMO_MODEL,)
        return (Path(self.model).resolve().name,)

    @property
    def model_path(self) -> Path:
        """The checkpoint's directory."""
        return demo_model_path() if self.model == DEMO_MODEL else Path(self.model)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Faults to inject, for tests."""
        return parse_faults(self.enable_fault_injection)

    @property
    def limits(self) -> SchedulerLimits:
        """The settings that are limits of the scheduler; the other limits are its own."""
        asked = {name: getattr(self, name) for name in LIMIT_NAMES if name in Settings.model_fields}
        claim = first_claim(self.max_num_batched_tokens, self.max_num_seqs, self.prefill_chunk)
        return SchedulerLimits(**asked, min_chunk=claim)

    def engine_config(self) -> EngineConfig:
        """The settings that the engine has a field for; it resolves the rest against the model and the machine."""
        given = {
            field.name: getattr(self, field.name)
            for field in fields(EngineConfig)
            if hasattr(self, field.name) and field.name != "kv_transfer"
        }
        folder, most_bytes = packed_folder(self.packed_cache)
        kept, most_kept = offload_folder(self.kv_offload_dir)
        words: dict[str, Any] = {
            "model": str(self.model_path),
            "tokenizer": self.tokenizer or "",
            "generation_config": "" if self.generation_config in {"auto", "none"} else self.generation_config,
            "kv_offload_dir": kept,
            "kv_offload_size": most_kept,
            "packed_cache": bool(folder),
            "packed_cache_dir": folder,
            "packed_cache_size": most_bytes,
        }
        return EngineConfig(**given | words, kv_transfer=self.kv_transfer)

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """The address where the engine lends KV blocks, and the secrets of the cluster's links; None: it lends none."""
        if self.kv_listen is None:
            return None
        files = {
            "cert": self.engine_tls_cert,
            "key": self.engine_tls_key,
            "ca": self.engine_tls_ca,
        }
        return KVTransferConfig(
            listen=self.kv_listen,
            reached_at=self.kv_address or "",
            transport=self.kv_transport,
            trusts_network=self.kv_trust_network,
            **{name: str(file) for name, file in files.items() if file is not None},
        )


def _is_name(template: Path) -> bool:
    """Whether it may be the name of one of the model's templates, which only the model's files tell."""
    return len(template.parts) == 1 and not template.suffix


def load_settings(flags: Mapping[str, object]) -> Settings:
    """The settings that flags (by field name), environment and file give together. Raises SettingsError."""
    check_environment(plain_fields(Settings), EXPERIMENTS)
    values: dict[str, Any] = dict(flags)
    try:
        return Settings(**values)
    except ValidationError as error:
        explained = (explain(problem, flags, EXPERIMENTS) for problem in error.errors())
        raise SettingsError(*(line for text in explained for line in text.split("\n"))) from None


def settings_and_problems(flags: Mapping[str, object]) -> tuple[Settings | None, list[str]]:
    """The settings, as `load_settings` gives them, or None and the problems of all sources, a line each."""
    problems: list[str] = []
    try:
        check_environment(plain_fields(Settings), EXPERIMENTS)
    except SettingsError as error:
        problems += error.lines
    each: tuple[dict[str, Any], ...] = (dict(flags), {**flags, "config": None})
    for values in each:  # without a file that cannot be used the others are checked
        try:
            settings = Settings(**values)
        except ValidationError as error:
            for problem in error.errors():
                problems += explain(problem, flags, EXPERIMENTS).split("\n")
            return None, problems
        except SettingsError as error:
            problems += error.lines
        else:
            return (None if problems else settings), problems
    return None, list(dict.fromkeys(problems))
