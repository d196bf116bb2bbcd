"""The settings of a server around the engine: listening, limits, streaming, lifetime, observing.

Promises: every bound on what clients may do has its field here or in `limits`. Must not know: HTTP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from quire_server.settings.experiments import ServerExperiments
from quire_server.settings.values import (
    JsonObject,
    Networks,
    OptionalSize,
    Origins,
    Positive,
    PositiveSeconds,
    RootPath,
    Seconds,
    Strings,
    option,
    synonym_of,
)

LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(synonym_of("log_level"))]


class ServerFields(ServerExperiments):
    """The last groups of `Settings`, which `quire serve` alone reads, but for its lifetime, links and logs."""

    # -- Model, Memory
    models: Strings = option((), "Model", "several models behind one port: a YAML file, or --model given several times")
    model_memory: OptionalSize = option(
        None,
        "Memory",
        "memory of several models together, loaded or sleeping; default: half of the free memory",
        "bytes",
    )

    # -- Listening
    host: str = option("127.0.0.1", "Listening", "address to listen on; 0.0.0.0 is all interfaces")
    port: Annotated[int, Field(ge=0, le=65535)] = option(8000, "Listening", "TCP port; 0 takes a free one")
    uds: Path | None = option(None, "Listening", "Unix socket to listen on, instead of host and port")
    root_path: RootPath = option(
        "",
        "Listening",
        "path under which a proxy publishes this server, such as /llm; requests work with and without it",
    )
    api_key: Strings = option(
        (),
        "Listening",
        "keys, one of which every client must send: KEY, NAME=KEY or @FILE; default: no key is needed",
        secret=True,
    )
    admin_api_key: Strings = option(
        (),
        "Listening",
        "keys for /debug and /admin: KEY, NAME=KEY or @FILE; default: see --allow-local-admin",
        secret=True,
    )
    allow_local_admin: bool = option(
        False, "Listening", "let clients on this machine use /debug and /admin without an admin key"
    )
    tenants: Path | None = option(
        None, "Listening", "YAML file with tenants: digests of their keys, weights, rates, quotas; see Tenants"
    )
    ssl_certfile: Path | None = option(None, "Listening", "certificate and its chain (PEM); clients then speak HTTPS")
    ssl_keyfile: Path | None = option(None, "Listening", "private key, when it is not in --ssl-certfile")
    ssl_keyfile_password: str | None = option(None, "Listening", "password of the private key", secret=True)
    ssl_ca_certs: Path | None = option(None, "Listening", "certificate authorities for client certificates")
    ssl_cert_reqs: Annotated[int, Field(ge=0, le=2)] = option(
        0, "Listening", "certificates of clients: 0 none, 1 checked if sent, 2 required"
    )
    allowed_origins: Origins = option((), "Listening", "origins browsers may call from (CORS); * is any")
    allowed_hosts: Strings = option(
        (), "Listening", "host names accepted besides this machine's own, *.NAME is all below NAME, * is any; see Hosts"
    )
    timeout_keep_alive: PositiveSeconds = option(
        75.0, "Listening", "time after which an idle connection is closed; set it above that of a proxy in front", "s"
    )

    # -- Limits
    max_body_bytes: OptionalSize = option(
        None, "Limits", "largest request body, else 413; default: what prompts for the context take", "bytes"
    )
    max_connections: Positive = option(
        1024, "Limits", "open connections, further ones are answered 503; half of them from one address"
    )
    trusted_proxies: Networks = option(
        (), "Limits", "addresses and networks of proxies, which may open all connections"
    )
    image_placeholder: Annotated[str, Field(min_length=1, max_length=1024)] | None = option(
        None, "Limits", "text that replaces each image in messages; default: a request with images is refused"
    )
    strict: bool = option(False, "Limits", "refuse fields without effect, such as unknown ones, instead of naming them")
    batch_dir: Path | None = option(
        None, "Limits", "folder of /v1/files and /v1/batches, which survive restarts; default: these routes are off"
    )
    warm_prefix: Path | None = option(
        None, "Limits", "JSON lines with prompts and messages that are computed into the prefix cache before the start"
    )

    # -- Streaming
    enable_force_include_usage: bool = option(
        False, "Streaming", "usage in every chunk of a stream, even if not requested"
    )

    # -- Lifetime
    api_server_count: Annotated[int, Field(ge=1, le=64)] = option(
        1,
        "Lifetime",
        "processes that accept connections, tokenize and format text; 2 or more work beside a main process",
    )
    replicas: Annotated[int, Field(ge=1, le=64)] = option(
        1, "Lifetime", "engines that share the cores and the memory; streams of one that is lost go on with the others"
    )
    drain_timeout: Seconds = option(30.0, "Lifetime", "after SIGTERM, running requests get this long to finish", "s")

    # -- Nodes
    engines: Strings = option(
        (), "Nodes", "nodes that compute instead of this server: HOST:PORT, dns:NAME:PORT, or file:PATH with one a line"
    )
    engine_tls_cert: Path | None = option(
        None, "Nodes", "certificate and its chain (PEM) for links between fronts and nodes; needed beyond this machine"
    )
    engine_tls_key: Path | None = option(None, "Nodes", "private key of --engine-tls-cert")
    engine_tls_ca: Path | None = option(None, "Nodes", "certificate authorities of fronts and nodes")

    # -- Observing
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(synonym_of("log_level"))] = (
        option("info", "Observing", "lowest level that is logged")
    )
    log_format: Literal["text", "json"] = option("text", "Observing", "json is one object per line")
    enable_log_requests: bool = option(False, "Observing", "log each request's parameters, never its text")
    disable_access_log: bool = option(False, "Observing", "no line per HTTP request")
    otlp_traces_endpoint: str | None = option(
        None, "Observing", "collector that gets a trace of each request (OTLP over HTTP); needs quire[otel]"
    )
    otlp_metrics_endpoint: str | None = option(
        None, "Observing", "collector that gets metrics of requests by GenAI's conventions (OTLP); needs quire[otel]"
    )
    kv_events_config: JsonObject = option(
        {},
        "Observing",
        "events of the KV cache for routers of others; JSON object; needs quire[events]",
    )
    dry_run: bool = option(False, "Observing", "print the memory plan and exit")
    config: Path | None = option(None, "Observing", "YAML file with any of these settings")

    # -- Experiments
    set: Strings = option(
        (), "Experiments", "a setting for tests, measurements and rare machines; `--set help` lists them"
    )
