"""Command lines of other servers in our settings: the usual flags of llama-server, SGLang and TGI, Ollama's variables.

Promises: each word that is given becomes a setting, a note that nothing changes, or a problem with its reason. The same
tables tell `quire config from` and `quire serve`, which takes words of llama-server where they mean the same. vLLM's
own flags need no translation: `vllm` has them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Convert = Callable[[Sequence[str]], Sequence[str]]  # values as they are given -> our words; raises ValueError
Takes = Literal["a value", "nothing", "on or off"]  # what follows a flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Names of another server's flags, and their fate here."""

    names: tuple[str, ...]  # with their hyphens; a variable as it is written
    fate: Literal["setting", "nothing", "refused"]
    text: str  # the reason, or what to do instead; of a setting what is different, if anything
    setting: str = ""  # the name of our setting, where there is one
    convert: Convert | None = None  # None: the same values
    takes: Takes = "a value"

    def words(self, values: Sequence[str]) -> list[str]:
        """Our words for these values; none where our default does it. Raises ValueError."""
        if self.fate != "setting":
            return []
        return list(self.convert(values)) if self.convert else [flag(self.setting), *values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Another server."""

    name: str  # as `quire config from` takes it
    title: str
    rows: tuple[Row, ...]
    defaults: Mapping[str, str]  # by our settings, for what is not given
    has_variables: bool = False  # variables in place of flags

    def row(self, name: str) -> Row | None:
        """The row that has a name."""
        return next((row for row in self.rows if name in row.names), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A command line of ours, and what is said about it."""

    words: tuple[str, ...]  # behind `quire serve`
    notes: tuple[str, ...]  # of what means something else in a detail, or changes nothing
    problems: tuple[str, ...]  # of what is not there; without them the server does what the other one did

    @property
    def command(self) -> str:
        """The command line of `quire serve`, quoted for a shell."""
        return shlex.join(("quire", "serve", *self.words))


_NUMBER = re.compile(r"-?\.?\d")
_TOGGLES = frozenset(("on", "off", "auto", "1", "0", "true", "false"))


def translate_words(server: Server, words: Sequence[str]) -> Translation:
    """Translate another server's command line, or its variables as NAME=value."""
    ours: dict[str, list[str]] = {}
    notes: list[str] = []
    problems: list[str] = []
    for name, values in _given(server, words):
        row = server.row(name)
        if row is None:
            problems.append(f"{name} of {server.title} has no translation; `quire serve --help` lists our flags")
        elif row.fate == "refused":
            problems.append(f"{name} {row.text}")
        else:
            try:
                found = row.words(values)
            except ValueError as error:
                problems.append(f"{' '.join((name, *values))}: {error}")
                continue
            if found:
                ours[found[0]] = found
            if row.text:
                notes.append(f"{name}: {row.text}")
    said = {word for found in ours.values() for word in found}
    for setting, value in server.defaults.items():
        if flag(setting) not in said:
            ours[flag(setting)] = [flag(setting), value]
    return Translation(
        words=tuple(word for found in ours.values() for word in found), notes=tuple(notes), problems=tuple(problems)
    )


def adopt(server: Server, words: Sequence[str], is_ours: Callable[[str, str], bool]) -> Translation:
    """Replace the flags of another server in a command line of `quire serve`; all other words stay.

    `is_ours`: whether a flag, with what follows it or nothing, is one of our own.
    """
    taken: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            taken += [word, *left]
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        following = value if equals else (left[0] if left else "")
        row = server.row(name) if _is_flag(word) else None
        if row is None or is_ours(name, following):
            taken.append(word)
            continue
        values = [value] if equals else _values(row, left)
        if row.fate == "refused":
            hint = f"`quire config from {server.name} ...` translates its command lines"
            problems.append(f"{name} ({server.title}'s) {row.text}; {hint}")
            continue
        try:
            taken += row.words(values)
            notes += [f"{name}: {row.text}"] if row.text else []
        except ValueError as error:
            problems.append(f"{' '.join((name, *values))}: {error}")
    return Translation(words=tuple(taken), notes=tuple(notes), problems=tuple(problems))


def variables_line(server: Server, names: Collection[str]) -> str:
    """A warning about variables of another server, which set nothing here; empty where there are none."""
    found = [name for name in sorted(names) if (row := server.row(name)) is not None and row.fate == "setting"]
    if not found:
        return ""
    given = " ".join(f'{name}="${name}"' for name in found)
    command = f"quire config from {server.name} {given}"
    return f"variables of {server.title} set nothing here; for flags that do the same: {command}"


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.match(word)


def _values(row: Row, left: list[str]) -> list[str]:
    """Take the value of a flag, if it has one, from the words behind it."""
    has_none = not left or _is_flag(left[0]) or row.takes == "nothing"
    if has_none or (row.takes == "on or off" and left[0] not in _TOGGLES):
        return []
    return [left.pop(0)]


def _given(server: Server, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag or variable with its values, in their order; a value without a flag is a name too."""
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if server.has_variables:
            yield name, [value]
            continue
        values = [value] if equals else []
        while _is_flag(word) and left and not _is_flag(left[0]):
            values.append(left.pop(0))
        yield name.replace("_", "-") if _is_flag(word) else word, values


def flag(setting: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + setting.replace("_", "-")


def _one_of(setting: str, values: Mapping[str, str | None], other: str) -> Convert:
    """Values by a table; None: our default does it. Raises ValueError with `other` for those that are not in it."""

    def convert(given: Sequence[str]) -> Sequence[str]:
        value = given[0] if given else "on"
        if value not in values:
            raise ValueError(other)
        ours = values[value]
        return () if ours is None else (flag(setting), ours)

    return convert


def _unless(setting: str, *absent: str) -> Convert:
    """The value under our name, unless it means that there is none."""
    return lambda values: () if values and values[0] in absent else (flag(setting), *values)


def _of_requests(name: str, *absent: str) -> Convert:
    """A default of requests, unless the value means that there is none."""
    ours = f"{flag('override_generation_config')}.{name}"
    return lambda values: () if values and values[0] in absent else (ours, *values)


def _listed(setting: str) -> Convert:
    """Values with commas between them."""
    return lambda values: (flag(setting), *",".join(values).split(","))


def _draft(values: Sequence[str]) -> Sequence[str]:
    if len(values) != 1:
        raise ValueError("expected a model")
    return ("--speculation", f"model:{values[0]}")


def _ollama_host(values: Sequence[str]) -> Sequence[str]:
    address = values[0].split("://")[-1].rstrip("/")
    host, colon, port = address.rpartition(":")
    if not colon or "]" in port:
        host, port = address, "11434"
    if not port.isdecimal():
        raise ValueError("expected HOST:PORT")
    return ("--host", host or "0.0.0.0", "--port", port)


def _device(values: Sequence[str]) -> Sequence[str]:
    return ("--device", "cpu") if values[:1] == ["0"] else ()


def _is(names: str, setting: str, text: str = "", convert: Convert | None = None, takes: Takes = "a value") -> Row:
    return Row(names=tuple(names.split()), fate="setting", text=text, setting=setting, convert=convert, takes=takes)


def _same(names: str) -> list[Row]:
    """Settings that have the same name here."""
    return [_is(name, name.removeprefix("--").replace("-", "_")) for name in names.split()]


def _nothing(names: str, text: str, takes: Takes = "a value") -> Row:
    return Row(names=tuple(names.split()), fate="nothing", text=f"changes nothing here, {text}", takes=takes)


def _refused(names: str, text: str) -> Row:
    return Row(names=tuple(names.split()), fate="refused", text=text)


_KERNELS = "the kernels for a machine are chosen by what it has; --set kernels and --set cpu_variant name others"
_NO_CODE = "nothing remote is run"
_OWN_FORMAT = "is not there: weights have the format of their file; --quantization int8 or int4 converts at load"
_ON_ONE_DEVICE = "a model is computed whole on one device: 0 is --device cpu, other numbers change nothing"
_HOST_CACHE = "on a GPU --swap-space adds memory of the host to the cache; on a CPU --kv-memory is that memory"
_ALONE = "a model alone stays loaded while the server runs; several have idle_seconds and --model-memory"
_MOST = "for requests without max_tokens, and the most that others get"
_DEFAULT = "for requests that bring none"
_RANKS = "each is a process"
_FORMATS = "names of formats differ: docs/api.md has ours"
_KV_TYPES: Mapping[str, str | None] = MappingProxyType({"f16": None, "bf16": None, "q8_0": "int8"})
_KV_TYPE = _one_of("kv_cache_dtype", _KV_TYPES, "the KV cache is the model's type (f16, bf16) or int8 (q8_0)")
_POLICY = _one_of("scheduling_policy", {"fcfs": "fcfs", "lpm": "lpm"}, "fcfs or lpm")
_RANK_COUNT = _unless("tensor_parallel_size", "1")

LLAMA_SERVER = Server(
    name="llama-server",
    title="llama-server",
    defaults={"port": "8080"},
    rows=(
        _is("-m --model", "model"),
        _is("-hf -hfr --hf-repo", "model", "a name on the Hub with the file's tag: user/model:Q4_K_M"),
        _is("-a --alias", "served_model_name", convert=_listed("served_model_name")),
        *_same("--host --port --api-key"),
        _is("-c --ctx-size", "max_model_len", "of each request, not shared among slots", _unless("max_model_len", "0")),
        _is("-np --parallel", "max_num_seqs", convert=_unless("max_num_seqs", "-1", "0")),
        _is("-b --batch-size", "max_num_batched_tokens"),
        _is("-t --threads", "num_threads", convert=_unless("num_threads", "-1", "0")),
        _is("-ngl --gpu-layers --n-gpu-layers", "device", _ON_ONE_DEVICE, _device),
        _is("-ctk --cache-type-k -ctv --cache-type-v", "kv_cache_dtype", "keys and values have one type", _KV_TYPE),
        _is(
            "-n --predict --n-predict", "override_generation_config", _MOST, _of_requests("max_new_tokens", "-1", "-2")
        ),
        _is("--temp --temperature", "override_generation_config", _DEFAULT, _of_requests("temperature")),
        _is("--top-k", "override_generation_config", _DEFAULT, _of_requests("top_k")),
        _is("--top-p", "override_generation_config", _DEFAULT, _of_requests("top_p")),
        _is("--min-p", "override_generation_config", _DEFAULT, _of_requests("min_p")),
        _is("--chat-template-file", "chat_template"),
        _is("-md --model-draft", "speculation", convert=_draft),
        _is("-v --verbose", "log_level", "", lambda _: ("--log-level", "debug"), "nothing"),
        *_same("--pooling"),
        _nothing("-fa --flash-attn", _KERNELS, "on or off"),
        _nothing("-ub --ubatch-size", _KERNELS),
        _nothing("--jinja", "chat templates are Jinja", "nothing"),
        _nothing(
            "--metrics --slots --embedding --embeddings --rerank --reranking",
            "the routes are there where the model can do it",
            "nothing",
        ),
        _nothing("-cb --cont-batching", "requests are always batched as they come", "nothing"),
        _nothing("--mlock --mmap --no-mmap", "packed weights are kept in files: see --packed-cache", "nothing"),
        _nothing("-cram --cache-ram", _HOST_CACHE),
        _refused("-mm --mmproj", "is not there: only text is computed"),
        _refused(
            "--grammar --grammar-file -j --json-schema", "is a field of requests: response_format, guided grammars"
        ),
    ),
)

SGLANG = Server(
    name="sglang",
    title="SGLang",
    defaults={"port": "30000"},
    rows=(
        _is("--model-path --model", "model"),
        *_same("--served-model-name --host --port --api-key --dtype --revision"),
        _is("--context-length", "max_model_len"),
        _is("--tp-size --tensor-parallel-size --tp", "tensor_parallel_size", _RANKS, _RANK_COUNT),
        _is("--dp-size --data-parallel-size --dp", "replicas", convert=_unless("replicas", "1")),
        _is("--mem-fraction-static", "gpu_memory_utilization", "of the device's memory, all in all"),
        _is("--max-running-requests", "max_num_seqs"),
        _is("--chunked-prefill-size", "prefill_chunk", convert=_unless("prefill_chunk", "-1")),
        _is("--schedule-policy", "scheduling_policy", convert=_POLICY),
        _is("--reasoning-parser", "reasoning_parser", _FORMATS),
        _is("--tool-call-parser", "tool_call_parser", _FORMATS),
        _nothing("--trust-remote-code", _NO_CODE, "nothing"),
        _refused("--quantization", _OWN_FORMAT),
    ),
)

TGI = Server(
    name="tgi",
    title="TGI",
    defaults={"port": "3000", "host": "0.0.0.0"},
    rows=(
        _is("--model-id", "model"),
        *_same("--revision --dtype --port --api-key"),
        _is("-p", "port"),
        _is("--hostname", "host"),
        _is("--num-shard", "tensor_parallel_size", _RANKS, _RANK_COUNT),
        _is("--max-total-tokens", "max_model_len"),
        _is("--max-batch-prefill-tokens", "max_num_batched_tokens", "of a step, decodes included"),
        _is("--max-batch-size", "max_num_seqs"),
        _is("--max-concurrent-requests", "max_num_queued_reqs", "those that wait, without those that run"),
        _is("--cuda-memory-fraction", "gpu_memory_utilization"),
        _nothing("--max-input-tokens --max-input-length", "a prompt may have what --max-total-tokens leaves"),
        _nothing("--sharded", "--num-shard alone says it"),
        _nothing("--trust-remote-code", _NO_CODE, "nothing"),
        _refused("--quantize", _OWN_FORMAT),
    ),
)

OLLAMA = Server(
    name="ollama",
    title="Ollama",
    has_variables=True,
    defaults={"port": "11434"},
    rows=(
        _is("OLLAMA_HOST", "host", "HOST:PORT becomes --host and --port", _ollama_host),
        _is("OLLAMA_CONTEXT_LENGTH", "max_model_len", convert=_unless("max_model_len", "0")),
        _is("OLLAMA_NUM_PARALLEL", "max_num_seqs", convert=_unless("max_num_seqs", "0")),
        _is("OLLAMA_MAX_QUEUE", "max_num_queued_reqs", "a full queue is 429 with Retry-After, not 503"),
        _is("OLLAMA_KV_CACHE_TYPE", "kv_cache_dtype", "", _KV_TYPE),
        _is("OLLAMA_ORIGINS", "allowed_origins", convert=_listed("allowed_origins")),
        _is("OLLAMA_MODELS", "download_dir", "of models from the Hub; Ollama's own files are not read"),
        _is("OLLAMA_DEBUG", "log_level", "", lambda v: () if v[0] in ("", "0", "false") else ("--log-level", "debug")),
        _nothing("OLLAMA_KEEP_ALIVE OLLAMA_MAX_LOADED_MODELS", _ALONE),
        _nothing("OLLAMA_FLASH_ATTENTION", _KERNELS),
    ),
)

SERVERS: Mapping[str, Server] = MappingProxyType({each.name: each for each in (OLLAMA, LLAMA_SERVER, SGLANG, TGI)})
