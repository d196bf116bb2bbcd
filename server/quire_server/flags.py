"""The command lines of `quire serve` and `quire engine`, generated from the fields of `Settings`.

Promises: a field added there is a flag here, with its group, unit, default and environment variable; a flag that the
program has no use for is refused.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from textwrap import wrap
from types import UnionType
from typing import Annotated, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import LIMIT_NAMES
from quire_server.settings import (
    ENV_PREFIX,
    GROUPS,
    Settings,
    SettingsError,
    flag_name,
    load_settings,
    settings_and_problems,
    suggest,
)
from quire_server.settings.experiments import EXPERIMENTS, SET, spelled, with_experiments
from quire_server.settings.fields import plain_fields
from quire_server.settings.keys import key_file, readable_by_others
from quire_server.settings.migration import LLAMA_SERVER, OLLAMA, Translation, adopt, variables_line
from quire_server.settings.node_fields import NodeFields
from quire_server.settings.sources import check_admin_keys, check_keys, environment_names, service_link_warnings
from quire_server.settings.values import Kinds, plain_words, synonym_of
from quire_server.settings.vllm import (
    add_hidden_flags,
    beside,
    flags_text,
    names_of_vllm,
    read_settings_file,
    short_names,
    translate,
    variable_warnings,
)

_FIELDS = plain_fields(Settings)
_SIZES = (("GiB", 2**30), ("MiB", 2**20))  # in which a size is shown where it is a whole number of them
SERVE, ENGINE = "quire serve", "quire engine"
_OF_ENGINES = {field.name for field in fields(EngineConfig)} - {"role"} | {*LIMIT_NAMES}
_OF_FRONTS_TOO = {"model", "tokenizer", "generation_config", "ignore_config_keys", "model_impl", "enable_lora"}
_OF_LINKS = {"engine_tls_cert", "engine_tls_key", "engine_tls_ca"}
_OF_NODES_ALONE = {*NodeFields.model_fields}
_OF_NODES = {
    *(_OF_ENGINES - {"replicas"} | _OF_LINKS | _OF_NODES_ALONE | {"revision", "download_dir"}),
    *("drain_timeout", "max_engine_restarts", "engine_hang_timeout", "log_level", "log_format"),
    *("enable_fault_injection", "dry_run", "config", "kv_events_config", SET),
}

_EPILOG = f"""\
Every flag is also an environment variable ({ENV_PREFIX}PORT=9000) and a key of the --config file (port: 9000).
A flag wins over the environment, the environment over the file, the file over the default.
`quire serve --help vllm` says what becomes of each flag of `vllm serve`. Underscores may stand for hyphens.
Sizes: 512MiB, 2GiB, 2GB. Tokens: 4096, 4k (4000), 4K (4096)."""


_OF_A_NODE = "Compute for servers on other machines, which are started with `quire serve --engines`."


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=_width())

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


class _Help(argparse.Action):
    """`--help`, and `--help vllm`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        del namespace, option_string
        text = flags_text(_FIELDS, _width()) if values == "vllm" else parser.format_help().rstrip()
        print(text)
        parser.exit()


class _Model(argparse.Action):
    """`--model`, which may be given several times."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: object = None,
    ) -> None:
        del parser, option_string
        namespace.model = values
        namespace.several_models = [*getattr(namespace, "several_models", []), values]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Settings from the command line, the environment and the file, and the messages about them for the log."""

    settings: Settings
    notes: tuple[str, ...]  # on flags without effect here
    warnings: tuple[str, ...]  # on variables without effect here, and on exposed keys


def parse_flags(argv: Sequence[str], prog: str = SERVE) -> Settings:
    """The settings of a command line, the environment and the file. Raises SettingsError; `--help` exits 0."""
    return parse_command_line(argv, prog).settings


def parse_command_line(argv: Sequence[str], prog: str = SERVE) -> CommandLine:
    """Parse a command line as `parse_flags` does, and return the messages for the log too."""
    parser = build_parser(prog)
    adopted = _adopted(argv)
    if adopted.problems:
        raise SettingsError(*adopted.problems)
    known, rest = parser.parse_known_args(plain_words(adopted.words, _kinds()))
    flags, notes = translate(vars(known))
    flags = with_experiments(flags, f"--{SET}")
    notes = [*adopted.notes, *notes]
    if unknown := _unknown(rest):
        raise SettingsError(*unknown)
    positional = flags.pop("positional_model", None)
    if positional is not None:
        if "model" in flags:
            raise SettingsError(_TWO_MODELS)
        flags["model"] = positional
    _take_several(flags)
    if not _KEYS & set(flags):
        check_keys()
    if not _ADMIN_KEYS & set(flags):
        check_admin_keys()
    settings = load_settings(flags)
    _check_program(prog, flags, settings)
    if settings.config is not None:
        notes += read_settings_file(settings.config, _FIELDS)[1]
    of_ollama = variables_line(OLLAMA, environment_names())
    variables = [
        *variable_warnings(environment_names()),
        *([of_ollama] if of_ollama else []),
        *service_link_warnings(),
    ]
    warnings = [*variables, *_secret_warnings(flags, settings)]
    return CommandLine(settings=settings, notes=tuple(notes), warnings=tuple(warnings))


def _adopted(argv: Sequence[str]) -> Translation:
    """The words with those of llama-server in ours. A short flag that nobody has is a problem, and not completed."""
    adopted = adopt(LLAMA_SERVER, argv, _is_ours)
    short = short_names()
    strange = [
        word
        for word in takewhile(lambda word: word != "--", adopted.words)
        if _SHORT.match(word) and word.partition("=")[0] not in {*short, "-h"} and not word.startswith("-O")
    ]
    if not strange:
        return adopted
    known = tuple(word for word in adopted.words if word not in strange)
    return replace(adopted, words=known, problems=(*adopted.problems, *_unknown(strange)))


_SHORT = re.compile(r"-[A-Za-z]")  # `-ngl` would be read as `-n gl`, and `-p` as the beginning of `-pp`


def _is_ours(name: str, following: str) -> bool:
    """Whether a flag is one of our settings or vLLM's, by what follows it."""
    if not name.startswith("--"):
        only = short_names().get(name)
        return name == "-h" or (only is not None and (not only or following in only))
    head = name.removeprefix("--").partition(".")[0]
    ours = {"help", *(field.replace("_", "-") for field in _FIELDS), *(flag.name for flag in beside(_FIELDS))}
    return head in ours or head.removeprefix("no-") in ours


def _take_several(flags: dict[str, object]) -> None:
    """`--model` given several times is `--models`. Raises SettingsError."""
    several = flags.pop("several_models", None)
    if isinstance(several, list) and len(several) > 1:
        del flags["model"]
        if "models" in flags:
            raise SettingsError("--models and --model exclude each other: write the models into the file")
        flags["models"] = tuple(several)


def _unknown(words: Sequence[str]) -> list[str]:
    """A line for each word that no flag has taken."""
    return [
        f"unknown flag {word}{suggest(word, [*_FIELDS, *names_of_vllm()])}"
        if word.startswith("-")
        else f"unexpected argument {word!r}"
        for word in (each.split("=")[0] for each in words)
    ]


def check_command_line(argv: Sequence[str], prog: str = SERVE) -> tuple[CommandLine | None, list[str]]:
    """Parse a command line and return a line for every problem; `parse_command_line` stops at the first kind.

    A flag with a value that cannot be read is left out for what follows.
    """
    try:
        return parse_command_line(argv, prog), []
    except SettingsError:
        pass
    problems: list[str] = []
    with _kept(problems):
        adopted = _adopted(argv)
        problems += adopted.problems
        words = plain_words(adopted.words, _kinds())
        known, rest = _readable(words, prog, problems)
        flags = {name: value for name, value in vars(known).items() if name in _FIELDS or name == "positional_model"}
        with _kept(problems):
            flags = translate(vars(known))[0]
        with _kept(problems):
            flags = with_experiments(flags, f"--{SET}")
        flags.pop(SET, None)
        problems += _unknown(rest)
        model = flags.pop("positional_model", None)
        if model is not None and "model" in flags:
            problems.append(_TWO_MODELS)
        with _kept(problems):
            _take_several(flags)
        for check, names in ((check_keys, _KEYS), (check_admin_keys, _ADMIN_KEYS)):
            if not names & set(flags):
                with _kept(problems):
                    check()
        settings, more = settings_and_problems(flags if model is None else {"model": model, **flags})
        problems += more
        if settings is not None:
            with _kept(problems):
                _check_program(prog, flags, settings)
    return None, list(dict.fromkeys(problems))


_KEYS, _ADMIN_KEYS = {"api_key"}, {"admin_api_key"}
_TWO_MODELS = "the model is given twice: as an argument and with --model; keep one"


@contextmanager
def _kept(problems: list[str]) -> Iterator[None]:
    """Keep the lines of a SettingsError and go on."""
    try:
        yield
    except SettingsError as error:
        problems += error.lines


def _readable(words: Sequence[str], prog: str, problems: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags whose values can be read and the words that are no flags; of each other flag a line in `problems`."""
    left = list(words)
    while True:
        parser = build_parser(prog)
        parser.exit_on_error = False
        try:
            return parser.parse_known_args(left)
        except argparse.ArgumentError as error:
            problems.append(str(error))
            names = (error.argument_name or "").split("/")
            first = next((i for i, word in enumerate(left) if word.split("=")[0] in names), None)
            if first is None:  # the model, which is no flag: without it nothing can be told apart
                return argparse.Namespace(), []
            last = first + 1
            while last < len(left) and not left[last].startswith("-"):
                last += 1
            del left[first:last]


def _check_program(prog: str, given: Collection[str], settings: Settings) -> None:
    """Raises SettingsError for flags that the program has no use for. A file may have settings of both programs."""
    flags = set(given)
    if prog == ENGINE:
        useless, why = flags - _OF_NODES, "is a front's, which `quire serve --engines` starts"
        if settings.listen is None:
            raise SettingsError("--listen is missing: HOST:PORT on which this node serves fronts")
    elif settings.engines:
        of_nodes = {*_OF_ENGINES, "kv_events_config"} - _OF_FRONTS_TOO
        useless, why = flags & of_nodes, "is the nodes': give it to `quire engine`"
    else:
        useless, why = flags & {*_OF_LINKS}, "is of links to nodes, which --engines names"
    if prog != ENGINE:
        useless |= flags & _OF_NODES_ALONE
    if useless:
        raise SettingsError(
            *(f"{spelled(name)} {_of_the_node(name) if name in _OF_NODES_ALONE else why}" for name in sorted(useless))
        )


def _of_the_node(name: str) -> str:
    """Say to a server that a flag is a node's, and what the server has instead."""
    return f"is of `quire engine`{_HERE.get(name, '')}"


_HERE = {
    "listen": "; this server listens on --host and --port",
    "metrics_listen": "; this server has /metrics on --host and --port",
}


def _secret_warnings(flags: Mapping[str, object], settings: Settings) -> Iterator[str]:
    """Warnings about keys that other users of this machine can read."""
    takes_files = {"api_key": settings.api_key, "admin_api_key": settings.admin_api_key}
    only_files = {name for name, keys in takes_files.items() if all(map(key_file, keys))}
    secret = (name for name in flags if name in _FIELDS and _extra(_FIELDS[name]).get("secret"))
    told = sorted(set(secret) - only_files)
    if told:
        names = " and ".join(map(flag_name, told))
        variables = ", ".join(f"{ENV_PREFIX}{name.upper()}" for name in told)
        files = "".join(f" or in a file: {flag_name(name)} @FILE" for name in told if name in takes_files)
        yield f"{names} on the command line can be read by every user of this machine: put it in {variables}{files}"
    for name, keys in takes_files.items():
        for key in keys:
            path = key_file(key)
            if path is not None and readable_by_others(path):
                yield f"{flag_name(name)} {key} can be read by every user of this machine: chmod o-r it"


def _kinds() -> Kinds:
    """How our flags and those beside them may be written."""
    every = _FIELDS | EXPERIMENTS  # some of which are flags of vLLM's
    kinds = {flag_name(name).removeprefix("--"): value_kind(field.annotation) for name, field in every.items()}
    others = beside(_FIELDS)
    return Kinds(
        switches={name for name, kind in kinds.items() if kind is bool}
        | {flag.name for flag in others if flag.takes == "switch"},
        optional={name: get_args(kind) for name, kind in kinds.items() if {"on", "off"} <= {*get_args(kind)}},
        json={name for name, kind in kinds.items() if kind is dict}
        | {flag.name for flag in others if flag.takes == "json"},
    )


def build_parser(prog: str) -> argparse.ArgumentParser:
    """One flag per field of `Settings` that the program uses, in the order and groups they are declared."""
    is_node = prog == ENGINE
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [MODEL] [flags]",
        description=_OF_A_NODE if is_node else "Serve a model over the OpenAI HTTP API.",
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "-h", "--help", action=_Help, nargs="?", metavar="vllm", help="this, or with `vllm` what becomes of its flags"
    )
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="the same as --model")
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for name, field in _FIELDS.items():
        shown = name in _OF_NODES if is_node else name not in _OF_NODES_ALONE
        _add_flag(groups[option_group(field)].add_argument, name, field, None if shown else argparse.SUPPRESS)
    add_hidden_flags(parser, _FIELDS)
    return parser


def _add_flag(add: Callable[..., object], name: str, field: FieldInfo, text: str | None = None) -> None:
    """Declare a flag by `add`, the `add_argument` of its group."""
    kind = value_kind(field.annotation)
    text = _help_text(field).replace("%", "%%") if text is None else text
    if name == SET:
        add(flag_name(name), action="append", type=_experiment, dest=name, metavar="NAME=VALUE", help=text)
    elif kind is bool:
        add(flag_name(name), action=argparse.BooleanOptionalAction, dest=name, help=text)
    elif kind is tuple:
        add(flag_name(name), nargs="+", action="extend", dest=name, metavar="S", help=text)
    elif name == "model":
        add(flag_name(name), action=_Model, dest=name, metavar="TEXT", help=text)
    elif get_origin(kind) is Literal:
        add(flag_name(name), dest=name, type=synonym_of(name), choices=get_args(kind), help=text)
    else:
        add(flag_name(name), dest=name, metavar=_metavar(kind, option_unit(field)), help=text)


def _experiment(text: str) -> str:
    """Return NAME=VALUE as it is. Prints what there is and exits for `help`."""
    if text == "help":
        print(_experiments_text(_width()))
        raise SystemExit(0)
    return text


def _experiments_text(width: int) -> str:
    """The text of `--set help`."""
    lines = ["Experiments: settings for tests, measurements and rare machines, each as --set NAME=VALUE.", ""]
    for name, field in EXPERIMENTS.items():
        kind = value_kind(field.annotation)
        values = f" ({', '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
        first, *rest = wrap(_help_text(field) + values, max(30, width - 27))
        lines += [f"{name:<26} {first}", *(f"{'':<26} {line}" for line in rest)]
    return "\n".join(lines)


def value_kind(annotation: object) -> object:
    """The plain type under `Annotated` and `| None`: bool, int, float, str, Path, tuple, dict or a Literal."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return value_kind(get_args(annotation)[0])
    if origin in {Union, UnionType}:
        return value_kind(next(part for part in get_args(annotation) if part is not type(None)))
    return annotation if origin in {None, Literal} else origin


def option_group(field: FieldInfo) -> str:
    """The heading a setting belongs under."""
    return str(_extra(field)["group"])


def option_unit(field: FieldInfo) -> str:
    """ "tokens", "bytes", "s" or nothing."""
    return str(_extra(field)["unit"])


def option_default(field: FieldInfo) -> str:
    """The default as an operator would type it; empty if the description explains what an unset value means."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value and option_unit(field) == "bytes" and isinstance(value, int):
        unit, size = next(((name, size) for name, size in _SIZES if value % size == 0), ("KiB", 2**10))
        return f"{value // size}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _extra(field: FieldInfo) -> dict[str, object]:
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        raise TypeError("every setting is declared with _option")
    return dict(extra)


def _help_text(field: FieldInfo) -> str:
    default = option_default(field)
    return f"{field.description} [{default}]" if default else str(field.description)


def _metavar(kind: object, unit: str) -> str:
    if unit:
        return {"s": "SECONDS"}.get(unit, unit.upper())
    names: dict[object, str] = {int: "N", float: "X", Path: "PATH", dict: "JSON"}
    return names.get(kind, "TEXT")


def _width() -> int:
    return min(120, shutil.get_terminal_size().columns)
