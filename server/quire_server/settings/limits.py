"""The server's fixed limits, and the removed settings, each with the value that is fixed now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_engine.contract.limits import SchedulerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits on requests, on memory held for clients, on slow clients and on waits. Tests make them smaller."""

    # The head and the body of a request.
    max_header_bytes: int = 32 << 10  # of a head; more is answered 431
    max_headers: int = 100  # lines of a head; more are answered 431
    header_timeout: float = 10.0  # seconds in which a head must be there
    body_timeout: float = 30.0  # seconds in which a body must be there, else it is answered 408
    # What may be held at once, over all connections, in bytes; more is answered 503.
    max_body_bytes_total: int = 64 << 20  # of bodies, or one of the largest if that is more
    max_text_bytes_queued: int = 64 << 20  # of texts that are tokenized or wait for it
    max_reply_bytes_waiting: int = 256 << 20  # of replies above 256 KiB that are made or sent
    response_store_bytes: int = 64 << 20  # of past responses; the longest unused go first
    # What clients keep on the disk, with --batch-dir.
    max_file_bytes: int = 200 << 20  # of one upload
    max_files_bytes: int = 10 << 30  # of all files of a tenant, or a key, with uploads and results under way
    # Streams, and clients that read slowly.
    sse_keep_alive_interval: float = 15.0  # seconds of silence until a stream gets a comment line, or a ping
    stream_buffer_tokens: int = 256  # waiting for a stream's client; beyond, its request is set aside
    client_min_rate: int = 64  # bytes a second, over the whole of `client_write_timeout`; who takes less is cut off
    client_write_timeout: float = 60.0  # seconds in which a client must take what waits for it, or the least rate
    # Logs.
    log_stats_interval: float = 10.0  # seconds between two lines with throughput, queue and cache, while requests run
    # Several engines.
    replica_silence: float = 2.0  # seconds without a sign of life after which a replica or a node is given up
    model_turn: float = 15.0  # seconds that a busy model stays loaded before it makes room for another


_STEPS, _SERVER = SchedulerLimits(), ServerLimits()
_SLOW = (
    f"a client that takes less than {_SERVER.client_min_rate} bytes/s for {_SERVER.client_write_timeout:g} s is cut off"
)

REMOVED: Mapping[str, str] = {
    # -- Scheduling
    "min_chunk": "the oldest request's claim on each step is a thirty-second of --max-num-batched-tokens,"
    f" {_STEPS.min_chunk} tokens at least",
    "max_bypasses": f"a request that waits for memory is overtaken at most {_STEPS.max_bypasses} times",
    "elder_age_steps": f"a request is overdue {_STEPS.elder_age_steps} steps after it could have been done",
    "batch_min_share": "--class-share batch=SHARE has it, and the share of interactive requests",
    "max_consecutive_chunks": "a long prompt goes before others that wait for at most"
    f" {_STEPS.max_consecutive_chunks} steps in a row",
    "step_log": f"the last {_STEPS.step_log} steps are remembered with their reasons, for /debug",
    # -- Limits
    "max_body_bytes_total": f"bodies may take {_SERVER.max_body_bytes_total >> 20} MiB at once,"
    " or --max-body-bytes if that is more",
    "max_header_bytes": f"a request's head may have {_SERVER.max_header_bytes >> 10} KiB",
    "max_headers": f"a request's head may have {_SERVER.max_headers} lines",
    "header_timeout": f"a request's head may take {_SERVER.header_timeout:g} s",
    "body_timeout": f"a request's body may take {_SERVER.body_timeout:g} s",
    "response_store_bytes": f"past responses take at most {_SERVER.response_store_bytes >> 20} MiB;"
    " --set response_store_size is how many are kept",
    "max_text_bytes_queued": "texts that wait to be tokenized may take"
    f" {_SERVER.max_text_bytes_queued >> 20} MiB at once",
    "max_reply_bytes_waiting": f"large replies may take {_SERVER.max_reply_bytes_waiting >> 20} MiB at once",
    # -- Streaming
    "stream_buffer_tokens": f"a stream is set aside once {_SERVER.stream_buffer_tokens} tokens wait for its client",
    "client_min_rate": _SLOW,
    "client_write_timeout": _SLOW,
    # -- Listening
    "max_connections_per_address": "one address may open half of --max-connections, those of --trusted-proxies all",
    # -- Memory
    "no_packed_cache": "--packed-cache off keeps no files of packed weights",
    "packed_cache_dir": "--packed-cache DIR names the directory of packed weights",
    "packed_cache_size": "--packed-cache DIR:64GiB has the most bytes after a colon",
    "kv_offload_size": "--kv-offload-dir DIR:16GiB has the most bytes after a colon",
    # -- Keys
    "api_key_file": "--api-key @FILE reads keys from a file, one a line",
    "admin_api_key_file": "--admin-api-key @FILE reads keys from a file, one a line",
    # -- Nodes
    "cluster_key_file": "the certificates of --engine-tls-ca's authority prove who is a node or a front",
    # -- Lifetime
    "failover_wait": "streams wait 30 s for a replica when none is left, then end with replica_lost",
    "replica_silence": f"a replica without a sign of life for {_SERVER.replica_silence:g} s is given up",
    "model_turn": f"a busy model stays loaded for {_SERVER.model_turn:g} s before it makes room for another",
    "spare_engine": "a process that has loaded its libraries always waits to be the next engine",
    "engine_restart_window": "--set max_engine_restarts counts those of the last 600 s",
    "engine_start_timeout": "a start of the engine that does not get on for 60 s is ended and tried again",
    # -- Observing
    "log_stats_interval": f"a line with throughput, queue and cache comes every {_SERVER.log_stats_interval:g} s while"
    " requests run; --log-level warning leaves it out",
    "enable_vllm_metric_names": "metrics are always exported under their vllm: names too",
    "vllm_old_metric_names": "metrics are always exported under the names that vLLM has removed too",
}
# Flags of vLLM, accepted without effect; their variables, which only Quire had, are refused.
WITHOUT_EFFECT: Mapping[str, str] = {
    "stream_interval": "tokens are sent as they come",
    "sse_keep_alive_interval": f"a silent stream gets a comment line every {_SERVER.sse_keep_alive_interval:g} s",
}
REMOVED_SWITCHES = frozenset(("enable_vllm_metric_names", "spare_engine", "vllm_old_metric_names"))  # `--no-x`


def removed_line(spelling: str, name: str) -> str:
    """The refusal of `name`, of `REMOVED` or `WITHOUT_EFFECT`, as the operator has spelled it."""
    return f"{spelling} is no setting any more, leave it out: {REMOVED.get(name) or WITHOUT_EFFECT[name]}"
