"""Command lines and variables written for vLLM, or for an earlier version of ours, in our settings.

Nothing is ignored silently: each flag becomes a setting, a note, a warning or a refusal with the reason.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Literal, cast

from quire_server.settings.experiments import EXPERIMENTS, spelled
from quire_server.settings.limits import REMOVED, REMOVED_SWITCHES, WITHOUT_EFFECT, removed_line
from quire_server.settings.sources import SettingsError, moved_line, read_config
from quire_server.settings.values import parse_count

_DEST = "vllm:"


def add_hidden_flags(parser: argparse.ArgumentParser, ours: Collection[str]) -> None:
    """Let a parser take flags of others too, without a word in its help. `ours` are the names of our settings."""
    for flag in beside(ours):
        names = (f"--{flag.name}", *flag.short)
        dest = _DEST + flag.name
        if flag.takes == "switch":
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, dest=dest, help=argparse.SUPPRESS)
        elif flag.takes == "values":
            parser.add_argument(*names, nargs="+", action="extend", dest=dest, help=argparse.SUPPRESS)
        else:
            # Where the flag is refused anyway, a value that is missing is not what to tell first.
            parser.add_argument(*names, nargs="?" if flag.refused else None, dest=dest, help=argparse.SUPPRESS)
    for flag in FLAGS:
        if flag.short and flag.setting and flag.name.replace("-", "_") in ours:  # our own name, and vLLM's short one
            parser.add_argument(*flag.short, dest=flag.setting, help=argparse.SUPPRESS)


def foreign(ours: Collection[str]) -> list[VllmFlag]:
    """The flags of the table that are not also names of our settings."""
    return [flag for flag in FLAGS if flag.name.replace("-", "_") not in ours]


def beside(ours: Collection[str]) -> list[VllmFlag]:
    """All flags that a parser must know beside our settings: vLLM's, and those that were settings of their own once."""
    return [*foreign(ours), *_GONE, *_MOVED]


def names_of_vllm() -> list[str]:
    """All names in the table, with underscores."""
    return [flag.name.replace("-", "_") for flag in FLAGS]


def short_names() -> dict[str, tuple[str, ...]]:
    """vLLM's short names, each with the only values that are taken; empty: any."""
    return {short: flag.only for flag in FLAGS for short in flag.short}


def translate(given: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The settings of parsed flags, with vLLM's flags translated, and notes on flags without effect.

    Raises SettingsError with one line for each flag that cannot be translated.
    """
    table = {_DEST + flag.name: flag for flag in (*FLAGS, *_GONE, *_MOVED)}
    settings = {name: value for name, value in given.items() if name not in table}
    notes: list[str] = []
    problems: list[str] = []
    # A method tells the kind of what another flag names, so that it comes first.
    for flag, value in sorted(_each(table, given, problems), key=lambda pair: pair[0].values is not _METHODS):
        words = _words(flag, value)
        if not _is_taken(flag, words):
            problems.append(_refusal(flag, words))
        elif flag.only:
            continue  # the flag states what is true here anyway
        elif not flag.setting:
            notes.append(f"{_spelling(flag, words)} changes nothing here: {flag.text}")
        else:
            _set(settings, flag, value, words)
    if problems:
        raise SettingsError(*problems)
    return settings, notes


def _each(
    table: Mapping[str, VllmFlag], given: Mapping[str, object], problems: list[str]
) -> Iterator[tuple[VllmFlag, object]]:
    """The given flags of the table with their values, and the keys of their objects; others are `problems`."""
    for name, value in given.items():
        flag = table.get(name)
        if flag is None or not flag.keys:
            yield from [] if flag is None else [(flag, value)]
            continue
        found = _object(value)
        known = {key.name.partition(".")[2]: key for key in flag.keys}
        if found is None or not found.keys() <= known.keys():
            problems.append(f"--{flag.name}: a JSON object with the keys {', '.join(known)} is expected")
            continue
        yield from ((flag, found[key]) for key, flag in known.items() if found.get(key) is not None)


def _object(value: object) -> dict[str, object] | None:
    """The JSON object that a flag's value is, as text or as a file has it."""
    try:
        decoded = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return {str(key).replace("-", "_"): each for key, each in decoded.items()} if isinstance(decoded, dict) else None


def read_settings_file(path: Path, ours: Collection[str]) -> tuple[dict[str, object], list[str]]:
    """Read a configuration file whose keys may be vLLM's flags, and translate these. Raises SettingsError."""
    theirs = {flag.name.replace("-", "_"): flag for flag in beside(ours)}
    values = read_config(path, lambda key: key in ours or key in theirs, ours)
    try:
        return translate({_DEST + theirs[key].name if key in theirs else key: value for key, value in values.items()})
    except SettingsError as error:
        raise SettingsError(*(f"--config {path}: {line.removeprefix('--')}" for line in error.lines)) from None


def flags_text(ours: Collection[str], width: int) -> str:
    """The text of `quire serve --help vllm`."""
    lines = [
        "What happens here to the flags of `vllm serve`. Those that are settings here under the same name are in",
        "`quire serve --help`; these are the others. JSON flags may be given in their dotted form.",
        "",
    ]
    for flag in sorted(foreign(ours), key=lambda flag: flag.name):
        names = ", ".join((f"--{flag.name}", *flag.short))
        first, *rest = wrap(_fate(flag), max(30, width - 38))
        lines += [f"{names:<37} {first}" if len(names) < 37 else f"{names}\n{'':<37} {first}"]
        lines += [f"{'':<37} {line}" for line in rest]
    return "\n".join(lines)


def _fate(flag: VllmFlag) -> str:
    if flag.refused:
        return f"refused: {flag.text}"
    if flag.setting:
        becomes = f"is {spelled(flag.setting)}"
        return f"{becomes}; {flag.text}" if flag.text else becomes
    if flag.only:
        return f"only {' or '.join(flag.only)}: {flag.text}"
    if flag.keys:
        return "; ".join(f"{key.name.partition('.')[2]} {_fate(key)}" for key in flag.keys)
    return f"taken, changes nothing: {flag.text}"


def _words(flag: VllmFlag, value: object) -> list[str]:
    """The value as the table writes it: `off`, or the parts of a list however it was written."""
    if isinstance(value, bool):
        return ["on" if value else "off"]
    if isinstance(value, list):
        return [str(part) for part in value]
    text = json.dumps(value) if isinstance(value, dict) else str(value).strip()
    if flag.takes == "json":
        try:
            decoded = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(decoded, list):
            return [str(part) for part in decoded]
        return [json.dumps(decoded)] if isinstance(decoded, dict) else [str(decoded)]
    return [part.strip() for part in text.split(",")] if flag.only else [text]


def _is_taken(flag: VllmFlag, words: Sequence[str]) -> bool:
    if flag.refused:
        return False
    return not flag.only or all(word in flag.only for word in words)


def _refusal(flag: VllmFlag, words: Sequence[str]) -> str:
    if flag.setting in REMOVED:
        return removed_line(f"--{flag.name}", flag.setting)
    if flag in _MOVED:
        return _moved(flag, words)
    if flag.refused or flag.takes == "switch":
        return f"{_spelling(flag, words)}: refused: {flag.text}"
    return f"{_spelling(flag, words)}: only {' or '.join(flag.only)} is taken: {flag.text}"


def _moved(flag: VllmFlag, words: Sequence[str]) -> str:
    """The refusal of an experiment that is given as a flag or a key of its own."""
    given = ",".join(words)
    value = {"on": "true", "off": "false", "None": "VALUE", "": "VALUE"}.get(given, given)
    pair = f"{flag.setting}={value}"
    return moved_line(_spelling(flag, words), f"--set {pair}, in a file set: [{pair}]")


def _spelling(flag: VllmFlag, words: Sequence[str]) -> str:
    """The flag as it may have been typed; values outside the table are left out, since they may be secrets."""
    if flag.takes == "switch":
        return f"--{flag.name}" if words == ["on"] else f"--no-{flag.name}"
    shown = " ".join(words)[:40]
    return f"--{flag.name} {shown}" if flag.only else f"--{flag.name}"


def _set(settings: dict[str, object], flag: VllmFlag, value: object, words: Sequence[str]) -> None:
    """Set a field unless our own flag has set it."""
    becomes = flag.values.get(words[0], flag.prefix + words[0] if flag.prefix else value)
    kind = settings.get(flag.setting)
    if flag.prefix and kind in _METHODS.values() and str(kind).endswith(":"):  # another flag has told the kind alone
        becomes = flag.values.get(words[0], f"{kind}{words[0]}")
        del settings[flag.setting]
    if flag.least and flag.setting in settings:
        settings[flag.setting] = min(settings[flag.setting], becomes, key=_count)
    elif becomes is not None:
        settings.setdefault(flag.setting, becomes)


def _count(value: object) -> float:
    """A count's size; what is none is left to the setting's own check."""
    try:
        return cast(int, parse_count(value))
    except ValueError:
        return 0


# Variables of vLLM that operators set, and their equivalents here. VLLM_API_KEY is supported itself.
_VARIABLES: Mapping[str, str] = {
    "VLLM_LOGGING_LEVEL": "--log-level",
    "VLLM_CONFIGURE_LOGGING": "--log-level and --log-format",
    "VLLM_LOGGING_CONFIG_PATH": "--log-level and --log-format",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--timeout-keep-alive",
    "VLLM_ATTENTION_BACKEND": "--set attention",
    "VLLM_BATCH_INVARIANT": "--deterministic",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-memory",
    "VLLM_CPU_OMP_THREADS_BIND": "--num-threads",
    "VLLM_TARGET_DEVICE": "--device",
    "VLLM_CACHE_ROOT": "--download-dir",
}
# Variables without effect here: usage reports, how processes start, the choice of the engine.
_HARMLESS = re.compile(
    r"VLLM_(NO_USAGE_STATS|DO_NOT_TRACK|USAGE_.*|USE_V1|WORKER_MULTIPROC_METHOD|API_KEY|DEBUG_LOG_API_SERVER_RESPONSE"
    r"|ENGINE_READY_TIMEOUT_S|SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*|RAY_.*|NCCL_.*|DP_.*|VERSION)"
)


def variable_warnings(names: Collection[str]) -> list[str]:
    """One line for each variable of vLLM that has a setting here, and one line for all others without effect."""
    found = sorted(name for name in names if name.startswith("VLLM_") and not _HARMLESS.fullmatch(name))
    lines = [f"{name} sets nothing here; use {_VARIABLES[name]}" for name in found if name in _VARIABLES]
    others = [name for name in found if name not in _VARIABLES]
    if others:
        shown = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
        lines.append(f"variables of vLLM that set nothing here: {shown}")
    return lines


Takes = Literal["switch", "value", "values", "json"]  # "switch" is `--x` and `--no-x`; its values are "on" and "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlag:
    """One flag. With neither `setting` nor `only`, any value is accepted; `refused`: no value is."""

    name: str  # "tensor-parallel-size"
    short: tuple[str, ...]  # "-tp"
    takes: Takes
    text: str  # why the flag has no effect, or why other values are refused
    setting: str = ""  # the field of ours that it sets
    values: Mapping[str, object | None] = field(default_factory=dict)  # to the setting's values; None sets nothing
    only: tuple[str, ...] = ()  # the accepted values
    refused: bool = False
    least: bool = False  # a count of which the smaller holds, where our own setting is given too
    prefix: str = ""  # of the setting's value, before what is given
    keys: tuple[VllmFlag, ...] = ()  # of a JSON object whose keys are flags of their own


def _names(names: str) -> list[tuple[str, tuple[str, ...]]]:
    """`a,-b c` -> [("a", ("-b",)), ("c", ())]."""
    split = [word.split(",") for word in names.split()]
    return [(name, tuple(short)) for name, *short in split]


def _is(
    name: str,
    setting: str,
    text: str = "",
    takes: Takes = "value",
    values: Mapping[str, object | None] = MappingProxyType({}),
    *,
    least: bool = False,
    prefix: str = "",
) -> list[VllmFlag]:
    """A setting of ours under another name; `values` translates values that have other names too."""
    return [
        VllmFlag(
            name=name, short=short, takes=takes, text=text, setting=setting, values=values, least=least, prefix=prefix
        )
        for name, short in _names(name)
    ]


def _keys(names: str, *keys: list[VllmFlag]) -> list[VllmFlag]:
    """A JSON object whose keys are flags, each named `name.key`."""
    listed = tuple(key for each in keys for key in each)
    return [VllmFlag(name=name, short=short, takes="json", text="", keys=listed) for name, short in _names(names)]


def _any(names: str, text: str, takes: Takes = "value") -> list[VllmFlag]:
    return [VllmFlag(name=name, short=short, takes=takes, text=text) for name, short in _names(names)]


def _only(names: str, values: str, text: str, takes: Takes = "value") -> list[VllmFlag]:
    return [
        VllmFlag(name=name, short=short, takes=takes, text=text, only=tuple(values.split()))
        for name, short in _names(names)
    ]


def _off(names: str, text: str) -> list[VllmFlag]:
    return _only(names, "off", text, "switch")


def _never(names: str, text: str, takes: Takes = "value") -> list[VllmFlag]:
    return [VllmFlag(name=name, short=short, takes=takes, text=text, refused=True) for name, short in _names(names)]


_SLEEP = "without --enable-sleep-mode it is unused"
_ONE = "ranks of one machine compute a model, with --tensor-parallel-size, and engines beside it, with --replicas"
_TEXT = "models of text only: no images, audio or video are read"
_EXPERTS = "every rank computes some columns of all experts of a layer"
_MAMBA = "models with states (Mamba) are not served"
_GRAPHS = "graphs and compilers change no answer; on a GPU steps run as CUDA graphs"
_LORA = "adapters are plain LoRA of all the matrices that they have; merge others into the checkpoint"
_SPECULATION = (
    "--speculation guesses tokens ahead: suffix by what the request itself said, model:DIR by a smaller model"
)
_SUFFIX = "the longest earlier place of a stream's last words is looked for, from two tokens on"
_METHODS = {"ngram": "suffix", "draft_model": "model:"}  # which model, another key tells
_DRAFTS = {"ngram": "suffix", "[ngram]": "suffix"}
_PAYS = "as many tokens are guessed as pay for their rows, at most five of a stream in a step"
_PLUGIN = "no code of others is loaded into the server"
_OFFLOAD = "weights stay in the memory of the device"
_MARKS = "the marks of thoughts are those of the chat template, or of --reasoning-parser"
_TRACES = "traces are of requests, with --otlp-traces-endpoint; there are no finer ones"
_RESTARTS = "an engine that ends is replaced, and its requests go on, five times within ten minutes"
_REMOTE = "KV blocks pass between nodes of Quire, by `quire engine --kv-listen`, and not through vLLM's connectors"
_ROLLOUT = "weights are read from files, and not passed between servers"

# A flag of `vllm serve` that is not a setting here is accepted only if it has no effect or if it is a setting of
# ours under another name. One line is for flags of one kind.
FLAGS: tuple[VllmFlag, ...] = (
    # -- Listening
    *_is("uvicorn-log-level", "log_level", values={"critical": "error", "trace": "debug"}),
    *_is("disable-uvicorn-access-log", "disable_access_log", takes="switch"),
    *_any("h11-max-header-count h11-max-incomplete-event-size", "a head has at most 100 lines and 32 KiB"),
    *_only("disable-access-log-for-endpoints", "/health /metrics /version /ping /load", "only these have no line"),
    *_only("allowed-methods", "*", "browsers may use GET and POST", "json"),
    *_only("allowed-headers", "*", "browsers may send every header", "json"),
    *_off("allow-credentials", "keys come in headers, never in cookies"),
    *_off("enable-ssl-refresh", "SIGHUP or POST /admin/reload reads a new certificate"),
    *_never("ssl-ciphers", "the ciphers are those that Python's ssl module takes to be safe"),
    *_never("middleware", _PLUGIN, "values"),
    *_is("api-server-count,-asc", "api_server_count"),
    *_off("grpc", "HTTP only"),
    *_never("grpc-port", "HTTP only"),
    *_off("enable-scale-out", "/v1/completions takes and gives token ids; a template is rendered by /tokenize"),
    *_off("headless", _ONE),
    *_off("tokens-only", "all routes are served; /v1/completions takes and gives token ids"),
    *_off("disable-fastapi-docs", "/docs and /openapi.json are always there; with --api-key they need the key too"),
    *_any("enable-offline-docs", "/docs needs no network", "switch"),
    *_any("enable-request-id-headers", "every reply has x-request-id", "switch"),
    # -- Names and the model
    *_only("task", "auto generate embed embedding score classify", "a checkpoint is what its config.json says"),
    *_only("runner", "auto generate pooling", "a checkpoint is what its config.json says"),
    *_only("convert", "auto none embed", "a checkpoint is what its config.json says"),
    *_only("tokenizer-mode", "auto hf fast", "tokenizer.json is read"),
    *_never("tokenizer-revision", "--revision is for the model and its tokenizer"),
    *_any("code-revision", "no code is read from a checkpoint"),
    *_any("trust-remote-code", "nothing remote is run, whatever a checkpoint brings", "switch"),
    *_never("hf-token", "set HF_TOKEN: what is on a command line all users of the machine can read"),
    *_never("hf-config-path", "config.json is read from the checkpoint"),
    *_only("hf-overrides", "{}", "config.json is taken as it is; change the file", "json"),
    *_never("rope-scaling rope-theta", "change config.json"),
    *_only("load-format", "auto hf safetensors gguf", "weights are read from safetensors or GGUF files"),
    *_only("config-format", "auto hf", "config.json is read"),
    *_any("safetensors-load-strategy pt-load-map-location", "how files are read changes no answer"),
    *_any("safetensors-prefetch-block-size safetensors-prefetch-num-threads", "how files are read changes no answer"),
    *_any("use-tqdm-on-load", "how files are read changes no answer", "switch"),
    *_any("ignore-patterns", "only what is needed is downloaded", "values"),
    *_only("model-loader-extra-config additional-config kernel-config", "{}", "there is nothing to configure", "json"),
    *_off("skip-tokenizer-init", "the tokenizer is always there; prompts may still be token ids"),
    *_is("max-logprobs", "max_logprobs"),
    *_only("logprobs-mode", "raw_logprobs", "log-probabilities are those of the model, before any rule"),
    *_never("logits-processors logits-processor-pattern", _PLUGIN, "values"),
    *_never("io-processor-plugin tool-parser-plugin reasoning-parser-plugin worker-extension-cls", _PLUGIN),
    *_never("scheduler-cls", "the scheduler is our own"),
    *_only("worker-cls", "auto", _PLUGIN),
    *_never("pooler-config override-pooler-config", "how hidden states are pooled is not an operator's choice", "json"),
    *_never("override-attention-dtype", "attention computes in the model's dtype"),
    *_off("enable-sleep-mode", "stop the server to free its memory"),
    *_any("enable-cumem-allocator enable-nccl-comm-suspend sleep-mode-offload-cudagraph", _SLEEP, "switch"),
    *_any("sleep-preserve-parameter-names", _SLEEP, "values"),
    *_off("enable-trace-replay", "the model says which tokens come, never a request"),
    *_off("return-sampling-mask", "replies have the log-probabilities of tokens, not their masks"),
    *_any("use-fp64-gumbel", "tokens are drawn in 64-bit integers", "switch"),
    *_never("model-class-overrides", _PLUGIN, "json"),
    *_never("quantization-config", "--quantization says how weights are held; there is nothing more to set", "json"),
    *_off("enable-prompt-embeds", "prompts are texts or token ids"),
    *_off("disable-sliding-window", "a model is computed as it was trained"),
    *_off("enable-return-routed-experts", "the experts of a token are not told"),
    *_any("allow-deprecated-quantization renderer-num-workers", "there is nothing to choose"),
    # -- Memory
    *_is("device-memory-utilization", "gpu_memory_utilization"),
    *_is("kv-cache-memory-bytes", "kv_memory"),
    *_never("num-gpu-blocks-override", "--kv-memory gives the size of the KV cache"),
    *_is("kv-offloading-size", "swap_space"),
    *_only("kv-offloading-backend", "native", "evicted prefixes are kept in --swap-space"),
    *_any("preemption-mode", "with --swap-space a preempted request is swapped where that costs less than computing"),
    *_only("cpu-offload-gb offload-group-size", "0 0.0", _OFFLOAD),
    *_never("offload-num-in-group offload-prefetch-step", _OFFLOAD),
    *_only("offload-backend", "auto none", _OFFLOAD),
    *_never("cpu-offload-params offload-params", _OFFLOAD, "values"),
    *_any("prefix-caching-hash-algo", "the hash changes no answer; ours is SHA-256"),
    *_any("prefix-cache-retention-interval prefix-match-unit", "prefixes are matched and kept by blocks"),
    *_any("swa-bounded-replay", "prefixes are kept with all that a window needs", "switch"),
    *_any("calculate-kv-scales", "an fp8 cache always has a scale for every token and head", "switch"),
    *_never("kv-cache-dtype-skip-layers", "all layers have one type of KV cache", "values"),
    *_off("kv-sharing-fast-prefill", "layers do not share KV caches"),
    *_only("mamba-cache-dtype mamba-ssm-cache-dtype mamba-cache-mode", "auto none", _MAMBA),
    *_any("mamba-block-size gdn-prefill-backend kda-prefill-backend mamba-backend mamba-ssu-algorithm", _MAMBA),
    *_any("mamba-cache-philox-rounds replayssm-buffer-len kda-decode-backend", _MAMBA),
    *_any("use-replayssm enable-mamba-cache-stochastic-rounding", _MAMBA, "switch"),
    *_any("enable-mamba-shared-prefix-checkpoint enable-mamba-fine-grained-prefix-cache", _MAMBA, "switch"),
    # -- Scheduling
    *_is("block-size", "block_size"),
    *_is("enable-prefix-caching", "enable_prefix_caching", takes="switch"),
    *_is("max-num-partial-prefills", "max_num_partial_prefills"),
    *_is("async-scheduling", "async_scheduling", values={"on": "on", "off": "off"}),
    *_is("long-prefill-token-threshold", "prefill_chunk", "0 is no limit", values={"0": None}),
    *_is("max-num-scheduled-tokens", "max_num_batched_tokens", "the smaller of both", least=True),
    *_is("max-num-active-seqs", "max_num_seqs", "the smaller of both", least=True),
    *_any("long-prefill-token-threshold-adaptive", "a prompt's part of a step follows --itl-target", "switch"),
    *_any("prefill-schedule-interval", _ONE),
    *_only("enable-chunked-prefill", "on", "prompts are always computed in chunks", "switch"),
    *_only("max-long-partial-prefills", "1", "max_num_partial_prefills is for long and short prompts"),
    *_only("num-lookahead-slots", "0", _SPECULATION),
    *_only("scheduler-delay-factor watermark", "0 0.0", "a request starts as soon as there is room"),
    *_only("num-scheduler-steps", "1", "every step is scheduled"),
    *_any(
        "scheduler-reserve-full-isl",
        "admission is by blocks; every accepted request has a bound on its waiting",
        "switch",
    ),
    *_any("use-v2-block-manager disable-cascade-attn", "there is one kind", "switch"),
    *_any("disable-hybrid-kv-cache-manager", "layers with a window give their blocks back", "switch"),
    *_any("multi-step-stream-outputs disable-async-output-proc", "tokens are sent as they come", "switch"),
    *_any("stream-interval", WITHOUT_EFFECT["stream_interval"]),
    *_any("sse-keep-alive-interval", WITHOUT_EFFECT["sse_keep_alive_interval"]),
    *_any("disable-frontend-multiprocessing", "the engine is always a process of its own", "switch"),
    # -- Execution
    *_any("enforce-eager", _GRAPHS, "switch"),
    *_any("compilation-config,-cc,-O", _GRAPHS, "json"),
    *_any("optimization-level max-seq-len-to-capture max-cudagraph-capture-size", _GRAPHS),
    *_any("cudagraph-capture-sizes cuda-graph-sizes", _GRAPHS, "values"),
    *_any("enable-flashinfer-autotune", "flashinfer is not used", "switch"),
    *_any("jit-monitor-mode", _GRAPHS),
    *_any("jit-monitor-verbose enable-bf16x3-router-gemm", _GRAPHS, "switch"),
    *_any("ir-op-priority", _GRAPHS, "json"),
    *_only("linear-backend sparse-indexer-topk-backend", "auto", "--set kernels chooses who computes products"),
    *_only("performance-mode", "balanced", "--itl-target weighs prompts against running streams"),
    *_is("attention-backend", "attention", values={"TRITON_ATTN": "triton", "FLASH_ATTN": "flash-attn"}),
    *_never("attention-config,-ac", "--set attention chooses who computes attention", "json"),
    *_is("tensor-parallel-size,-tp", "tensor_parallel_size"),
    *_only("pipeline-parallel-size,-pp data-parallel-size,-dp nnodes,-n", "1", _ONE),
    *_only(
        "data-parallel-size-local,-dpl decode-context-parallel-size,-dcp prefill-context-parallel-size,-pcp", "1", _ONE
    ),
    *_only("node-rank,-r data-parallel-rank,-dpn data-parallel-start-rank,-dpr ubatch-size", "0", _ONE),
    *_off("data-parallel-multi-port-external-lb,-dpm", _ONE),
    *_any("data-parallel-supervisor-port dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s", _ONE),
    *_any("dp-supervisor-probe-failure-threshold dp-sync-interval elastic-ep-max-dp-size", _ONE),
    *_any("dcp-q-replicate enable-batch-sharded-sampling enable-hc-sp enable-shm-tensor-arena", _ONE, "switch"),
    *_any("enable-fault-tolerance", _RESTARTS, "switch"),
    *_any("fault-tolerance-config", _RESTARTS, "json"),
    *_never("data-parallel-address,-dpa data-parallel-rpc-port,-dpp data-parallel-backend,-dpb master-addr", _ONE),
    *_never("master-port cp-kv-cache-interleave-size dcp-kv-cache-interleave-size dcp-comm-backend", _ONE),
    *_never("dbo-decode-token-threshold dbo-prefill-token-threshold", _ONE),
    *_off("data-parallel-hybrid-lb,-dph data-parallel-external-lb,-dpe enable-dbo enable-elastic-ep", _ONE),
    *_only("distributed-executor-backend", "mp uni", "ranks are processes of one machine"),
    *_any("distributed-timeout-seconds cpu-distributed-timeout-seconds max-parallel-loading-workers", _ONE),
    *_any("disable-custom-all-reduce disable-nccl-for-dp-synchronization", _ONE, "switch"),
    *_off("ray-workers-use-nsight", _ONE),
    *_never("device-ids", "CUDA_VISIBLE_DEVICES chooses the GPU"),
    *_never("numa-bind-nodes numa-bind-cpus", "taskset or numactl choose cores and memory", "values"),
    *_off("numa-bind", "taskset or numactl choose cores and memory"),
    *_off("enable-expert-parallel,-ep enable-eplb enable-ep-weight-filter", _EXPERTS),
    *_any("all2all-backend eplb-config expert-placement-strategy moe-backend num-redundant-experts", _EXPERTS),
    # -- Chat
    *_only("chat-template-content-format", "auto string", "parts of a message are put together into one text"),
    *_only("response-role", "assistant", "replies are the assistant's"),
    *_off("trust-request-chat-template", "requests cannot bring templates"),
    *_off("return-tokens-as-token-ids", 'requests may ask for it: "return_tokens_as_token_ids": true'),
    *_never("tool-server", "tools are run by clients"),
    *_any("enable-auto-tool-choice", "tools are used where a request brings them", "switch"),
    *_off("exclude-tools-when-tool-choice-none", "templates are given the tools that a request brings"),
    *_any("enable-reasoning", "thoughts are told from answers where the model has them", "switch"),
    *_only("tool-strict-level", "auto", 'arguments are held to a schema where a tool says "strict": true'),
    *_only("anthropic-disabled-thinking-effort", "auto none", "thinking that a request disables is off"),
    *_any("cohere-format", "there is no route of Cohere's chat"),
    *_any("cohere-is-reasoning-model", "there is no route of Cohere's chat", "switch"),
    *_keys(
        "reasoning-config",
        _is("reasoning-config.reasoning_parser", "reasoning_parser"),
        _any("reasoning-config.reasoning_start_str reasoning-config.reasoning_end_str", _MARKS),
        _any("reasoning-config.think_start_str reasoning-config.think_end_str", _MARKS),
        _any("reasoning-config.enable_in_reasoning", _MARKS, "switch"),
    ),
    *_any("guided-decoding-backend", "one library computes all masks"),
    *_keys(
        "structured-outputs-config",
        _any("structured-outputs-config.backend", "one library computes all masks"),
        _any("structured-outputs-config.disable_fallback", "there is no fallback", "switch"),
        _off("structured-outputs-config.disable_any_whitespace", "a schema's reply may have white space"),
        _off("structured-outputs-config.disable_additional_properties", "a schema says what it allows"),
        _off("structured-outputs-config.enable_in_reasoning", "thoughts are free text"),
        _is("structured-outputs-config.reasoning_parser", "reasoning_parser"),
        _never("structured-outputs-config.reasoning_parser_plugin", _PLUGIN),
    ),
    *_off("guided-decoding-disable-any-whitespace", "a schema's reply may have white space"),
    *_any("guided-decoding-disable-fallback", "there is no fallback: what cannot be held to is refused", "switch"),
    # -- Media
    *_any("limit-mm-per-prompt mm-processor-kwargs media-io-kwargs mm-processor-cache-gb mm-encoder-tp-mode", _TEXT),
    *_any("mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-encoder-attn-backend mm-tensor-ipc", _TEXT),
    *_any("allowed-local-media-path video-pruning-rate video-pruning-method mm-hasher-algorithm", _TEXT),
    *_any("mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path", _TEXT),
    *_any("mm-encoder-fp8-scale-save-margin mm-ipc-gpu-memory-gb mm-processor-device", _TEXT),
    *_any("mm-device-do-normalize trust-request-mm-kwargs", _TEXT, "switch"),
    *_any("allowed-media-domains", _TEXT, "values"),
    *_any("language-model-only interleave-mm-strings skip-mm-profiling disable-mm-preprocessor-cache", _TEXT, "switch"),
    *_any("disable-chunked-mm-input", _TEXT, "switch"),
    *_off("enable-mm-embeds mm-encoder-only", _TEXT),
    # -- Adapters and speculation
    *_is("max-cpu-loras", "max_cpu_loras"),
    *_off("enable-lora-bias enable-prompt-adapter enable-tower-connector-lora", _LORA),
    *_never("prompt-adapters lora-target-modules", _LORA, "values"),
    *_never("default-mm-loras qlora-adapter-name-or-path", _LORA),
    *_any("lora-dtype", "adapters have the type that the kernels compute with"),
    *_any("lora-extra-vocab-size max-lora-cls-labels", "adapters add neither tokens nor labels"),
    *_any("fully-sharded-loras specialize-active-lora", _ONE, "switch"),
    *_any("enable-mixed-moe-lora-format enable-moe-shared-loras", "experts are not adapted", "switch"),
    *_keys(
        "speculative-config,-sc",
        _is("speculative-config.method", "speculation", _SPECULATION, values=_METHODS),
        _is("speculative-config.model", "speculation", _SPECULATION, values=_DRAFTS, prefix="model:"),
        _any("speculative-config.num_speculative_tokens", _PAYS),
        _any("speculative-config.prompt_lookup_min speculative-config.prompt_lookup_max", _SUFFIX),
        _any("speculative-config.suffix_decoding_max_tree_depth", _SUFFIX),
        _any("speculative-config.suffix_decoding_max_cached_requests", _SUFFIX),
        _any("speculative-config.suffix_decoding_max_spec_factor", _PAYS),
        _any("speculative-config.suffix_decoding_min_token_prob", _PAYS),
        _any("speculative-config.disable_by_batch_size", _PAYS),
        _only("speculative-config.draft_tensor_parallel_size", "1", _ONE),
    ),
    *_is("spec-method", "speculation", _SPECULATION, values=_METHODS),
    *_any("spec-tokens num-speculative-tokens", _PAYS),
    *_is("speculative-model spec-model", "speculation", _SPECULATION, values=_DRAFTS, prefix="model:"),
    *_any("per-request-spec-decode-metrics", _SPECULATION),
    *_never("diffusion-config,-dc", "models write one token after the other", "json"),
    *_never("kv-transfer-config ec-transfer-config", _REMOTE, "json"),
    *_never("weight-transfer-config", _ROLLOUT, "json"),
    *_never("ec-manager-config", _REMOTE, "json"),
    *_never("watermark-config", "texts are not marked", "json"),
    *_never("engram-config", "models with tables of n-grams are not served", "json"),
    *_never("aux-output-config", "replies have what the API documents", "json"),
    # -- Observing
    *_any("disable-log-stats", "a line with throughput comes every 10 s; --log-level warning leaves it out", "switch"),
    *_is("disable-log-requests", "enable_log_requests", takes="switch", values={"on": False, "off": True}),
    *_any("max-log-len", "texts are never logged"),
    *_off("enable-log-outputs", "texts are never logged"),
    *_any("enable-log-deltas", "texts are never logged", "switch"),
    *_never("log-config-file", "--log-level and --log-format say what is logged"),
    *_keys(
        "logging-config",
        _is("logging-config.log_level", "log_level"),
        _is("logging-config.formatter", "log_format"),
        _only("logging-config.configure_logging", "on", "--log-level and --log-format say what is logged", "switch"),
        _never("logging-config.pylogging_config_file", "--log-level and --log-format say what is logged"),
    ),
    *_off("log-error-stack", "what a client is told of an error is in the reply; our own faults are logged in full"),
    *_any("enable-server-load-tracking", "/load is always there", "switch"),
    *_any("enable-prompt-tokens-details", "usage always has them", "switch"),
    *_off("enable-per-request-metrics", "replies carry no times; /metrics has them"),
    *_any("enable-tokenizer-info-endpoint", "/tokenizer_info is always there", "switch"),
    *_only("fingerprint-mode", "full hash", "system_fingerprint is a hash of model and settings"),
    *_never("fingerprint-value", "system_fingerprint is a hash of model and settings"),
    *_never("collect-detailed-traces", _TRACES, "values"),
    *_off("enable-layerwise-nvtx-tracing enable-logging-iteration-details", _TRACES),
    *_never("profiler-config", _TRACES, "json"),
    *_off("kv-cache-metrics cudagraph-metrics enable-mfu-metrics", "/metrics has what there is"),
    *_any("kv-cache-metrics-sample", "/metrics has what there is"),
    *_any("custom-histogram-buckets", "the buckets of /metrics are fixed, so that servers can be summed", "json"),
    *_any("enable-flash-late-interaction", "texts are compared by one vector each", "switch"),
    *_any("show-hidden-metrics-for-version", "metrics are always exported under the older names too"),
    *_any("aggregate-engine-logging", "there is one engine", "switch"),
    *_any("fail-on-environ-validation", "VLLM_ variables that would change something are named at the start", "switch"),
    # -- Lifetime
    *_is("shutdown-timeout", "drain_timeout"),
)

# What were settings of ours; some were switches.
_GONE = tuple(
    VllmFlag(
        name=name.replace("_", "-"),
        short=(),
        takes="switch" if name in REMOVED_SWITCHES else "value",
        text="",
        setting=name,
        refused=True,
    )
    for name in REMOVED
)

# What were settings of their own, and no flag of vLLM's: experiments now.
_MOVED = tuple(
    VllmFlag(
        name=name.replace("_", "-"),
        short=(),
        takes="switch" if field.annotation is bool else "values" if field.default == () else "value",
        text="",
        setting=name,
        refused=True,
    )
    for name, field in EXPERIMENTS.items()
    if name not in names_of_vllm()
)
