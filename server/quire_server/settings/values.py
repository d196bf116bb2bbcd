"""The syntax of the values of settings: sizes, counts, lists, names, JSON; each as a type for a field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.config import JsonDict
from pydantic_settings import NoDecode

from quire_engine.contract.config import SPECULATIONS, draft_model
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import LeastShares
from quire_engine.contract.types import MAX_LOGPROBS
from quire_server.settings.sources import SettingsError

T = TypeVar("T")


def option(default: T, group: str, description: str, unit: str = "", *, secret: bool = False) -> T:
    """A field with the group and unit that `--help` and the documents print; a secret is never printed."""
    extra: JsonDict = {"group": group, "unit": unit, "secret": secret}
    return Field(default, description=description, json_schema_extra=extra, repr=not secret)


def _split_list(value: object) -> object:
    """Split `a,b` or `["a", "b"]` from the environment; lists from flags and YAML are returned unchanged."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _split_origins(value: object) -> object:
    """Split a list, also one JSON list in one word, as vLLM's flag takes it."""
    if isinstance(value, list | tuple) and len(value) == 1 and str(value[0]).lstrip().startswith("["):
        return _split_list(str(value[0]))
    return _split_list(value)


def _check_root_path(path: str) -> str:
    if path and (not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+/?", path) or "/." in path):
        raise ValueError("expected a path such as /llm, of A-Z a-z 0-9 . _ ~ -")
    return path.rstrip("/")


def _parse_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("expected a JSON object such as '{\"enable_thinking\": false}'") from None


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to load at the start."""

    name: str
    path: str
    base_model_name: str = ""  # the parent that lists of models name; empty: the model's first name


def _parse_lora_modules(value: object) -> object:
    """`name=path`, or vLLM's `{"name": ..., "path": ..., "base_model_name": ...}`, each once or in a list."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = [value]
    given = _split_list(value)
    return tuple(map(_parse_lora_module, given)) if isinstance(given, list | tuple) else given


def _parse_lora_module(value: object) -> LoraModule:
    expected = 'expected name=directory, or {"name": "a", "path": "/adapters/a"}'
    if isinstance(value, LoraModule):
        return value
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        name, divider, path = value.partition("=")
        fields: object = {"name": name, "path": path} if divider else None
    else:
        fields = _parse_json(value)
    if not isinstance(fields, dict) or not {"name", "path"} <= fields.keys() <= {"name", "path", "base_model_name"}:
        raise ValueError(expected)
    words = {key: each for key, each in fields.items() if each is not None}
    if not all(isinstance(each, str) and each for each in words.values()):
        raise ValueError(expected)
    return LoraModule(_check_name(words["name"]), words["path"], words.get("base_model_name", ""))


_COUNT_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_count(value: object) -> object:
    """`8k` is 8000 and `8K` is 8192, as elsewhere; `auto` and -1 are None."""
    if value == -1:  # as vLLM writes auto
        return None
    if not isinstance(value, str):
        return value
    if value in {"auto", "-1"}:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", value.strip())
    if match is None:
        raise ValueError("expected a number of tokens such as 4096, 4k (4000) or 4K (4096)")
    return int(float(match[1]) * _COUNT_SUFFIX.get(match[2], 1))


_LEAST_BYTES = 1024  # smaller sizes are a mistake
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


def _check_packed_cache(value: object) -> object:
    """`off`, as YAML reads it too, or a directory that may have a size."""
    if value is False or (isinstance(value, str) and value.lower() in {"off", "false"}):
        return "off"
    is_switch = str(value).lower() in {"on", "true", "0", "1"}  # no directory is meant
    if is_switch or not isinstance(value, str | Path) or not packed_folder(str(value))[0]:
        raise ValueError("expected DIR, DIR:SIZE such as /var/packed:64GiB, or off")
    return str(value)


_PACKED_BYTES, _OFFLOAD_BYTES = 64 << 30, 16 << 30  # where no size is given


def packed_folder(value: str) -> tuple[str, int]:
    """The directory and the most bytes of `DIR:SIZE` or `DIR`; no directory for "off"."""
    return ("", _PACKED_BYTES) if value == "off" else _folder(value, _PACKED_BYTES)


def offload_folder(value: str | None) -> tuple[str, int]:
    """The directory and the most bytes of `DIR:SIZE` or `DIR`; no directory for None."""
    return _folder(value or "", _OFFLOAD_BYTES)


def _folder(value: str, most_bytes: int) -> tuple[str, int]:
    directory, _, size = value.rpartition(":")
    return (directory, cast(int, _parse_size(size))) if directory else (value, most_bytes)


def _check_offload(value: object) -> object:
    """A directory that may have a size."""
    if not isinstance(value, str | Path):
        return value
    _folder(str(value), _OFFLOAD_BYTES)
    return str(value)


def _parse_optional_size(value: object) -> object:
    """A size; `auto` is None."""
    return None if value == "auto" else _parse_size(value)


def _parse_swap_space(value: object) -> object:
    """A size; a bare number below 1024 counts GiB, as vLLM's flag of this name does."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value * 2**30 if value < _LEAST_BYTES else value)
    return _parse_size(value)


# vLLM's names for some values.
SYNONYMS: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "generation_config": {"vllm": "none"},
    "log_level": {
        **{level.upper(): level for level in ("debug", "info", "warning", "error")},
        **{"CRITICAL": "error", "NOTSET": "debug"},
    },
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "model_impl": {"vllm": "native"},
}


def synonym_of(field: str) -> Callable[[Any], Any]:
    """A function that replaces another server's name of a value by ours."""
    known = SYNONYMS.get(field, {})
    return lambda value: known.get(value, value) if isinstance(value, str) else value


def _check_networks(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        try:
            ip_network(name)
        except ValueError:
            raise ValueError(f"{name!r} is no address or network; 10.0.0.7 and 10.0.0.0/8 are") from None
    return names


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._/:-]{1,96}", name):
        raise ValueError("names are 1 to 96 characters of A-Z a-z 0-9 . _ - / :")
    return name


def _check_speculation(value: str) -> str:
    if value not in SPECULATIONS and not draft_model(value):
        reason = "heads such as EAGLE are not supported; " if value.startswith("eagle") else ""
        raise ValueError(f"{reason}expected {', '.join(SPECULATIONS)} or model:DIR, the directory of a smaller model")
    return value


def _parse_shares(value: object) -> LeastShares:
    try:
        shares = LeastShares.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if shares.problem is not None:
        raise ValueError(shares.problem)
    return shares


def _check_block_size(size: int) -> int:
    if size not in {16, 32, 64, 128, 256}:
        raise ValueError("block sizes are 16, 32, 64, 128 or 256 tokens; 16 suits most models")
    return size


ClassShare = Annotated[LeastShares, NoDecode, BeforeValidator(_parse_shares)]
Speculation = Annotated[str, AfterValidator(_check_speculation)]
Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_origins)]
Networks = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list), AfterValidator(_check_networks)]
RootPath = Annotated[str, AfterValidator(_check_root_path)]
Names = Annotated[tuple[Annotated[str, AfterValidator(_check_name)], ...], NoDecode, BeforeValidator(_split_list)]
JsonObject = Annotated[dict[str, object], NoDecode, BeforeValidator(_parse_json)]
LoraModules = Annotated[tuple[LoraModule, ...], NoDecode, BeforeValidator(_parse_lora_modules)]
Count = Annotated[int, BeforeValidator(parse_count)]
OptionalCount = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(parse_count)]
Size = Annotated[int, BeforeValidator(_parse_size), Field(gt=0)]
OptionalSize = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_parse_optional_size)]
OffloadFolder = Annotated[str, BeforeValidator(_check_offload)]
PackedCache = Annotated[str, BeforeValidator(_check_packed_cache)]
SwapSpace = Annotated[int, BeforeValidator(_parse_swap_space), Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
LogprobLimit = Annotated[
    int, Field(ge=-1, le=MAX_LOGPROBS), AfterValidator(lambda most: MAX_LOGPROBS if most == -1 else most)
]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
BlockSize = Annotated[int, AfterValidator(_check_block_size)]


_TRUTH = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Names of flags, without leading hyphens, by the kinds of values they take."""

    switches: Collection[str]  # `--x`, `--no-x`, and `--x=true` as some scripts write it
    optional: Mapping[str, Collection[str]]  # `--x VALUE`, and `--x` and `--no-x` for its values "on" and "off"
    json: Collection[str]  # `--x '{"a": 1}'`, or `--x.a 1`


@dataclass(slots=True)
class _Reader:
    """The words still to be read, and the values of dotted flags so far."""

    words: list[str]
    kinds: Kinds
    plain: list[str] = field(default_factory=list)
    dotted: dict[str, dict[str, Any]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def next_is(self, values: Collection[str]) -> bool:
        return bool(self.words) and self.words[0].lower() in values


def plain_words(argv: Sequence[str], kinds: Kinds) -> list[str]:
    """Return the command line in the parser's spelling. Raises SettingsError for dotted flags that make no object.

    Underscores, dotted JSON and switches with a value are rewritten to the one spelling of a flag; values stay as they
    are.
    """
    reader = _Reader(words=list(argv), kinds=kinds)
    while reader.words:
        word = reader.words.pop(0)
        if word == "--":
            return [*_gathered(reader), word, *reader.words]
        if word.startswith("--"):
            _read(reader, word)
        else:
            reader.plain.append(word)
    return _gathered(reader)


def _read(reader: _Reader, word: str) -> None:
    given, equals, value = word.removeprefix("--").partition("=")
    head, dot, path = given.partition(".")
    name = head.replace("_", "-")
    positive = name.removeprefix("no-")
    if name in reader.kinds.json:
        if dot:
            _gather(reader, name, path, value if equals else _following(reader, word))
            return
        reader.whole.add(name)
    elif name in reader.kinds.switches and not dot:
        if equals and value.lower() in _TRUTH:
            reader.plain.append(f"--{name}" if _TRUTH[value.lower()] else f"--no-{name}")
            return
        if not equals and reader.next_is({"true", "false"}):
            reader.plain.append(f"--{name}" if _TRUTH[reader.words.pop(0).lower()] else f"--no-{name}")
            return
    elif positive in reader.kinds.optional and not equals and not dot:
        if name != positive:
            reader.plain.append(f"--{positive}=off")
            return
        if not reader.next_is(reader.kinds.optional[name]):
            reader.plain.append(f"--{name}=on")
            return
    reader.plain.append(f"--{name}{dot}{path}{equals}{value}")


def _following(reader: _Reader, word: str) -> str:
    if not reader.words or reader.words[0].startswith("--"):
        raise SettingsError(f"{word}: expected a value")
    return reader.words.pop(0)


def _gather(reader: _Reader, name: str, path: str, text: str) -> None:
    """`a.b 1` sets `{"a": {"b": 1}}`; `a+ x,y` appends to a list."""
    *parents, last = path.split(".")
    place = reader.dotted.setdefault(name, {})
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise SettingsError(f"--{name}.{path}: {parent} has been given a value that is no object")
    if last.endswith("+"):
        listed = place.setdefault(last.removesuffix("+"), [])
        if not isinstance(listed, list):
            raise SettingsError(f"--{name}.{path}: it has been given a value that is no list")
        listed.extend(_value(part) for part in text.split(","))
    else:
        place[last] = _value(text)


def _value(text: str) -> object:
    try:
        decoded: object = json.loads(text)
    except ValueError:
        return text
    return decoded


def _gathered(reader: _Reader) -> list[str]:
    both = sorted(reader.whole & set(reader.dotted))
    if both:
        raise SettingsError(*(f"--{name}: given whole and in its dotted form; keep one" for name in both))
    return [*reader.plain, *(f"--{name}={json.dumps(value)}" for name, value in reader.dotted.items())]
